"""The model cards of the demo target and of its EAGLE3 heads; every figure in them comes from the training's results."""

from __future__ import annotations

import textwrap
from pathlib import Path

from bench.demo_training.eagle3 import CONFIGS, LAYER_IDS
from bench.demo_training.model import CONFIG, DRAFT_STEPS


def fill(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 118, break_long_words=False, break_on_hyphens=False)


def package_rows(packages: dict[str, dict]) -> list[str]:
    def row(name: str, licence: str, entries: list[dict]) -> str:
        size = sum(entry["bytes"] for entry in entries) / 1e6
        return f"| {name} | {licence} | {sum(entry['files'] for entry in entries)} | {size:.2f} |"

    named, rest = list(packages.items())[:24], list(packages.values())[24:]
    rows = [row(name, entry["licence"], [entry]) for name, entry in named]
    if rest:
        rows.append(row(f"{len(rest)} more", "each MIT, BSD, Apache-2.0, ISC, PSF or alike", rest))
    return [*rows, row("all", "", list(packages.values()))]


def write_card(folder: Path, results: dict) -> None:
    """The card of the target."""
    evaluation = results["evaluation"]
    texts = [
        f"Temperature {s['temperature']}:\n\n~~~~text\n{(s['prompt'] + s['text']).rstrip()}\n~~~~\n"
        for s in evaluation["samples"]
    ]
    sections = [
        "---\nlicense: apache-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "tags: [deepseek_v3, mtp, demo]\n---",
        "# jaxspec demo target",
        fill(
            f"A DeepSeek-V3 of {results['parameters']['total'] / 1e6:.1f} M parameters with a NextN (MTP) layer, trained on",
            "Python",
            "source. It exists to demonstrate and test an inference engine: it has the real architecture (latent",
            "attention with the published latent and head sizes, grouped sigmoid routing with a correction bias, YaRN,",
            "one NextN layer) and writes text that looks like Python. **It is not for any other use: what it writes is",
            "plausible, not right.**",
        ),
        *_model(results["parameters"]),
        *_data(results["corpus"]),
        *_training(results["training"], results["environment"]),
        *_measurements(evaluation),
        "## Samples",
        "\n".join(texts).rstrip(),
        "## How to train it again",
        "    python -m bench.demo_training --out DIR",
        fill(
            "on a machine with a GPU. The corpus is what is installed there, and training stops by the clock, so",
            "another",
            "machine gives another model.",
        ),
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _model(parameters: dict) -> list[str]:
    c, yarn = CONFIG, CONFIG["rope_scaling"]
    return [
        "## Model",
        fill(
            f"`DeepseekV3ForCausalLM`, bf16: {parameters['target']:,} parameters in the target,",
            f"{parameters['nextn']:,} in the NextN layer. {c['num_hidden_layers']} layers (the first dense), hidden",
            f"size {c['hidden_size']}, {c['num_attention_heads']} heads, latent {c['kv_lora_rank']}",
            f"+ {c['qk_rope_head_dim']}, {c['n_routed_experts']} routed experts in {c['n_group']} groups (top",
            f"{c['num_experts_per_tok']} within {c['topk_group']} group) and {c['n_shared_experts']} shared, context",
            f"{c['max_position_embeddings']} (YaRN factor {yarn['factor']} over",
            f"{yarn['original_max_position_embeddings']}), vocabulary {c['vocab_size']} (byte-level BPE).",
        ),
        fill(
            f"The NextN layer is stored as on the hub, at `model.layers.{c['num_hidden_layers']}.*`. Its copies of the",
            "embedding and of the output head (`embed_tokens`, `shared_head.head`) are left out to save space: they",
            "are",
            "the target's. The router biases (`e_score_correction_bias`) are float32. Plain `transformers` loads the",
            "target and reports the NextN weights as unexpected.",
        ),
        fill(
            "Encoding a plain prompt puts `<|begin|>` first. A chat is",
            "`<|begin|><|system|>...<|user|>...<|assistant|>...<|end|>`, as `chat_template.jinja` writes it.",
        ),
    ]


def _data(corpus: dict) -> list[str]:
    train, held_out = corpus["train"], corpus["held_out"]
    return [
        "## Data",
        fill(
            "Python files of the standard library and of permissively licensed packages, as installed on the training",
            f"machine: {train['files']} training files; with the conversations {train['documents']} documents,",
            f"{train['text_bytes'] / 1e6:.1f} MB of text, {train['tokens'] / 1e6:.1f} M tokens.",
            f"{train['chat_documents']}",
            f"documents ({train['chat_text_bytes'] / train['text_bytes']:.1%} of the text) are conversations made from",
            "functions that have a docstring. Left out: generated and data-like files, leading licence comments,",
            "folders",
            f"with vendored code, and {corpus['dropped_as_copies_or_near_copies']} copies and near-copies.",
        ),
        fill(
            f"Held out, by a hash of the content: {held_out['files']} whole files and the conversations made from",
            "them,",
            f"{held_out['tokens']:,} tokens. Packages share idioms:",
            f"{held_out['share_of_long_lines_also_in_training_files']:.0%} of the held-out files' lines of 20",
            "characters",
            "or more also stand in some training file.",
        ),
        "\n".join(
            [
                "| package | licence it declares | files | MB |",
                "| --- | --- | --- | --- |",
                *package_rows(corpus["packages"]),
            ]
        ),
        "The full list is in the repository's `bench/results/train_demo.json`.",
    ]


def _training(training: dict, environment: dict) -> list[str]:
    phases = [
        f"| {name} | {p['steps']} | {p['sequences_per_step']} x {p['sequence_length']} | "
        f"{'target and NextN' if p['trains_target'] else 'NextN only'} | {p['draft_steps']} | {p['seconds']:.0f} |"
        for name, p in training["phases"].items()
    ]
    return [
        "## Training",
        fill(
            f"{training['steps']} steps over {training['tokens'] / 1e6:.0f} M tokens",
            f"({training['passes_over_the_corpus']:.1f} passes) in {training['seconds'] / 60:.1f} minutes on one",
            f"{environment['device']} (torch {environment['torch']}, transformers {environment['transformers']}). Muon",
            "for the matrices, Adam for the rest. The expert load is balanced by the correction bias alone.",
        ),
        "\n".join(
            [
                "| phase | steps | sequences | trains | draft steps | seconds |",
                "| --- | --- | --- | --- | --- | --- |",
                *phases,
            ]
        ),
    ]


def _measurements(evaluation: dict) -> list[str]:
    language = [
        f"| {m['window']} | {m['nats_per_token']} | {m['bits_per_byte']} | {m['top1_accuracy']:.1%} | "
        f"{' / '.join(f'{a:.1%}' for a in m['draft_agreement_by_step'])} | "
        f"{' / '.join(f'{a:.1%}' for a in m['draft_overlap_at_temperature_1_by_step'])} |"
        for m in evaluation["held_out"]
    ]
    decoding = [
        f"| {d['temperature']} | {d['mean_acceptance_length']:.2f} | "
        f"{' / '.join(f'{a:.1%}' for a in d['acceptance_by_position'])} | {d['verify_steps']} | "
        f"{d['distinct_4_token_runs']:.1%} |"
        for d in evaluation["speculative_decoding"]
    ]
    first = evaluation["speculative_decoding"][0]
    return [
        "## Measured on the held-out text",
        fill(
            f"With the folder's own bf16 weights ({evaluation['arithmetic']}), on the whole held-out text, cut into",
            "windows:",
        ),
        "\n".join(
            [
                "| window | nats/token | bits/byte | top-1 | NextN's first choice is the target's, draft step "
                "1 / 2 / 3 | overlap of the distributions, 1 / 2 / 3 |",
                "| --- | --- | --- | --- | --- | --- |",
                *language,
            ]
        ),
        "In this table each draft step is fed the text's own tokens.",
        fill(
            f"Speculative decoding of {first['new_tokens_per_prompt']} tokens after {first['prompts']} held-out",
            "prompts",
            f"with k = {first['k']}; the draft proposes its first choices and the target keeps those it decodes",
            "itself.",
            "The last column tells how far the text repeats itself, which makes drafting easy.",
        ),
        "\n".join(
            [
                "| temperature | tokens per verification | draft positions 1 / 2 / 3 accepted | verifications | "
                "distinct runs of 4 tokens |",
                "| --- | --- | --- | --- | --- |",
                *decoding,
            ]
        ),
    ]


def write_draft_card(folder: Path, name: str, results: dict) -> None:
    """The card of one head."""
    head, training, environment = results["heads"][name], results["training"], results["environment"]
    config, evaluation = CONFIGS[name], head["evaluation"]
    ids = config["eagle_config"][LAYER_IDS]
    kind = "ids of the layers that put them out" if ids[0] == 1 else "ids of the layers that take them in"
    if config["model_type"] == "llama":
        layer = (f"one Llama layer ({config['num_attention_heads']} query and {config['num_key_value_heads']} key heads "
                 f"of {config['head_dim']}, half rope without scaling)")  # fmt: skip
        vocabulary = (f"It drafts the {config['draft_vocab_size']} most frequent of the {config['vocab_size']} tokens "
                      f"({head['vocabulary_coverage']:.1%} of the training text): `target_id = j + d2t[j]`.")  # fmt: skip
    else:
        layer = (f"one MLA layer ({config['num_attention_heads']} heads, latent {config['kv_lora_rank']} + "
                 f"{config['qk_rope_head_dim']}, interleaved rope, YaRN and softmax scale as in the target)")  # fmt: skip
        vocabulary = "It drafts in the full vocabulary."
    held_out = [
        f"| {m['window']} | {' / '.join(f'{a:.1%}' for a in m['draft_agreement_by_step'])} | "
        f"{' / '.join(f'{a:.1%}' for a in m['draft_overlap_at_temperature_1_by_step'])} |"
        for m in evaluation["held_out"]
    ]
    decoding = [
        f"| {d['temperature']} | {d['mean_acceptance_length']:.2f} | "
        f"{' / '.join(f'{a:.1%}' for a in d['acceptance_by_position'])} | {d['verify_steps']} |"
        for d in evaluation["speculative_decoding"]
    ]
    first = evaluation["speculative_decoding"][0]
    sections = [
        f"---\nlicense: apache-2.0\ntags: [eagle3, speculative-decoding, demo]\n---\n\n# jaxspec demo {name}",
        fill(
            f"An EAGLE3 draft head (`{config['architectures'][0]}`, bf16, {head['parameters']:,} parameters) for the",
            f"demo model in `../target`: {layer} and a dense MLP of {config['intermediate_size']}. {vocabulary} The",
            "embedding is the target's and not stored; the output head is the draft's own. Like the target it is for",
            "demonstrations and tests only. Licence: Apache-2.0.",
        ),
        fill(
            f"It captures the residual stream entering the target's layers {head['captured_layer_inputs']} (counted from",
            f"0), written in the configuration as {ids}: {kind}. A list that begins with 1 is of the first kind.",
        ),
        fill(
            f"Trained with the target frozen, {training['steps']} steps over {training['tokens'] / 1e6:.0f} M tokens in",
            f"{training['seconds'] / 60:.1f} minutes on one {environment['device']}, both heads in the same run: KL",
            f"divergence from the target's distribution over {DRAFT_STEPS} draft steps, in which the head reads its own",
            "hidden states. The text is the target's own training corpus, described in `../target/README.md`. Measured",
            f"on its held-out part with this folder's weights ({results['arithmetic']}):",
        ),
        "| window | draft's first choice is the target's, draft step 1 / 2 / 3 | overlap of the distributions |\n"
        "| --- | --- | --- |\n" + "\n".join(held_out),
        "In this table each draft step is fed the text's own tokens.",
        fill(
            f"Speculative decoding of {first['new_tokens_per_prompt']} tokens after {first['prompts']} held-out prompts",
            f"with k = {first['k']}; the draft proposes its first choices and the target keeps those it decodes itself.",
        ),
        "| temperature | tokens per verification | draft positions 1 / 2 / 3 accepted | verifications |\n"
        "| --- | --- | --- | --- |\n" + "\n".join(decoding),
        "Every figure: the repository's `bench/results/train_eagle3.json`. To train both heads again:",
        "    python -m bench.demo_training --out DIR --drafts",
    ]  # fmt: skip
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")
