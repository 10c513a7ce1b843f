"""`jaxspec serve` as one process of several, with a table of one step: what compiles is most of a start on a CPU.

Arguments: "lean" for a step without all parameters of sampling, else "full"; then those of the command.
"""

import dataclasses
import sys

from jaxspec.engine import buckets, runner
from serve.cli import main

if __name__ == "__main__":
    table, variant = buckets.bucket_table, sys.argv[1]
    runner.bucket_table = lambda settings: (dataclasses.replace(table(settings)[-1], variant=variant),)
    sys.exit(main(["serve", *sys.argv[2:]]))
