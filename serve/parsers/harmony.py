"""gpt-oss: an output is several messages, each with a channel, and a call is a message to a function.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`; the last tag ends the output and is no part of its text.
"""

import re

from serve.parsers.events import Sink
from serve.parsers.source import Parsing, Source, attempt

_MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STARTS = ("<|start|>", "<|channel|>")
TOKENS = (_MESSAGE, *ENDS, *STARTS, "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<>{}\"']{1,256})")


def parse_harmony(source: Source, sink: Sink, *, tools: bool, reasoning: bool) -> Parsing[int]:
    """Reads a whole output. Returns how many characters of it had been read when the last thought ended.

    Args:
        tools, reasoning: whether calls and thoughts are told from the answer.
    """
    thought_end = 0
    while True:
        tag = yield from source.until(sink.content, *STARTS)
        if tag is None:
            return thought_end
        found = yield from attempt(source, source.short(_MESSAGE))
        if found is None:
            sink.content(tag)
            continue
        header = tag + found[0]
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        if function and tools:
            sink.call(function.group(1))
            yield from source.until(sink.arguments, *ENDS)
            if not source.cut:
                sink.end_call()
        elif reasoning and channel and channel.group(1) == "analysis":
            yield from source.until(sink.reasoning, *ENDS)
            thought_end = source.consumed
            sink.end_of_reasoning()
        else:
            yield from source.until(sink.content, *ENDS)
