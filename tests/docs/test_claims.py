"""What the documents say of the code is true: names, defaults, values of flags, and each "bit for bit".

A claim that is new in a page is added here with the code, or with the test, that shows it.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from importlib import import_module

import mlx.core as mx
import pytest
from conftest import PROMPT, tiny_model
from documents import PAGES, ROOT

import gearbx_mlx
from gearbx_mlx import Gearbox
from gearbx_mlx.__main__ import COMMANDS
from gearbx_mlx.bit_selection import LAZY, STRICT
from gearbx_mlx.cli.flags import GearFlags
from gearbx_mlx.decoding import modes
from gearbx_mlx.formats import DEFAULT_FORMAT
from gearbx_mlx.formats.codebook import DEFAULT_OPTIONS
from gearbx_mlx.gears import ladder
from gearbx_mlx.generate import setup_arg_parser as generate_parser
from gearbx_mlx.kernels.dispatch import on_cpu
from gearbx_mlx.ranks.watch import meeting_timeout
from gearbx_mlx.routing import gates, pair


@functools.cache
def text_of(page: str) -> str:
    return " ".join(PAGES[page].read_text(encoding="utf-8").split())


def settings_of(command: str, *flags: str):
    """The settings of a command line."""
    before, sys.argv = sys.argv, [command, *flags]
    try:
        return import_module(f"gearbx_mlx.{command}").setup_arg_parser().settings()
    finally:
        sys.argv = before


def field_default(kind: type, name: str):
    return next(item.default for item in dataclasses.fields(kind) if item.name == name)


SPREAD = gates.default_thresholds(2, 32768), gates.default_thresholds(3, 32768)
# Page, sentence, and a function of what the code has for each {} of it.
DEFAULTS = [
    ("architecture", "the gears in ascending precision, `{}` by default", lambda: ladder.DEFAULT_LADDER),
    ("architecture", "(`{}`, the default, and `int8`)", lambda: ladder.DEFAULT_ACTIVATIONS),
    ("batches", "| `{}` (the default) |", lambda: gates.DEFAULT_POLICY),
    ("chat", "`--max-tokens` ({} by default)", lambda: settings_of("chat").prompt.max_tokens),
    ("convert", "`--gears` ({} by default)", lambda: settings_of("convert", "--calibrate").ladder),
    ("convert", "| `{}` (default) |", lambda: ladder.EMBEDDINGS[0]),
    ("distributed", "seconds to wait for the other ranks; {:.0f} by default", meeting_timeout),
    ("formats", "| `{}` (default) | 2, 3, 4, 5, 6, 8 |", lambda: DEFAULT_FORMAT),
    ("formats", "`convert --q-group-size` inputs ({})", lambda: ladder.DEFAULT_GROUP_SIZE),
    ("formats", "`{}` (the default: all linear layers", lambda: ladder.MANAGE[0]),
    ("formats", "| `{}` (default) | all gears", lambda: GearFlags().residency.name),
    ("generate", "| `{}` (default) |", lambda: modes.LOSSLESS),
    ("generate", "The default is {} (log2 V) / 17", lambda: pair.EAD_BITS),
    ("kernels", "| `{}` (default) | on a CPU", lambda: GearFlags().kernels.name),
    ("kernels", "| `{}` (default) | quantizes activations", lambda: ladder.DEFAULT_ACTIVATIONS),
    ("python", "The default is `{}`;", lambda: modes.mode_class(modes.LOSSLESS).__name__),
    ("routing", "default thresholds are the GEARBX paper's: {} and {} bits", lambda: SPREAD[1]),
    ("sensitivity", "| `--bits` | widths to measure | `{}` |", lambda: joined(settings_of("sensitivity"), "bits")),
    ("codebook", "weight is an outlier | {:g} |", lambda: DEFAULT_OPTIONS.sigma),
    ("codebook", "largest share of outliers | {:g} of", lambda: DEFAULT_OPTIONS.cap),
    ("codebook", "Lloyd's iteration | {} |", lambda: DEFAULT_OPTIONS.rounds),
    ("codebook", "codebooks of a matrix | {} |", lambda: DEFAULT_OPTIONS.library),
    ("codebook", "weights that share one | {} |", lambda: DEFAULT_OPTIONS.group),
    ("codebook", "the strict floor | {:g} ", lambda: STRICT),
    ("papers", "| mode | a gear for each token, by past entropies | `{}` |", lambda: modes.LOSSLESS),
    ("papers", "| gears | `4,8,16` | `{}` in mode lossless", lambda: ladder.EXACT_LADDER),
    ("papers", "`{}` in others |", lambda: ladder.DEFAULT_LADDER),
    ("papers", "| `{}` | nested bit planes", lambda: DEFAULT_FORMAT),
    ("papers", "| attention | `{}` linear layers", lambda: ladder.MANAGE[0]),
    ("papers", "| none: `{}` and `{}` bits, scaled by log2 V", lambda: SPREAD[1]),
    ("papers", "| `{}` | on unified memory", lambda: GearFlags().residency.name),
    ("papers", "PyTorch: 5 | `{}` |", lambda: gates.DEFAULT_WINDOW),
    ("papers", "| none is named | `{}` tokens", lambda: gates.DEFAULT_MIN_GEAR_DURATION),
    ("papers", "are best | `{}` bits, scaled", lambda: pair.EAD_BITS),
    ("papers", "5 and 10 tokens | `{}` and `{}` tokens", lambda: (pair.DEFAULT_WINDOW, pair.DEFAULT_MIN_DURATION)),
    ("papers", "Table 10 has 0.96 | `{}` |", lambda: STRICT),
    ("papers", "H1.5 has 0.93 | `{}` |", lambda: LAZY),
]


def joined(settings, name: str) -> str:
    """The value of a setting, with commas, whatever group it is in."""
    groups = (getattr(settings, item.name) for item in dataclasses.fields(settings))
    value = next(getattr(group, name) for group in groups if hasattr(group, name))
    return value if isinstance(value, str) else ",".join(map(str, value))


@pytest.mark.parametrize(("page", "sentence", "value"), DEFAULTS, ids=[f"{page}: {s}" for page, s, _ in DEFAULTS])
def test_a_default_is_the_codes(page, sentence, value):
    found = value()
    values = found if isinstance(found, tuple) else (found,)
    assert sentence.format(*values) in text_of(f"docs/{page}.md")


CLAIM = re.compile(r"\(the default|\(default\)|(?<!, )by default(?=[ )])|, the default\b")
# What depends on the machine, on other flags or on the model; tests of the command have these.
DECIDED = (
    "| `native` (default) |",
    "the default with `--residency",
    "(`as blocks`, the default)",
)
DECIDED += ("`--mode lossless`, the default", "(`lossless` by default)", "`5m` (the default here)")
DECIDED += ("integers; by default activations of 16 bits", "`--kernels auto:float`; by default codes")
DECIDED += ("would copy activations; by default", "integers; by default", "by default as the model needs")


def test_every_default_of_page_is_tested():
    for name in PAGES:
        text = text_of(name)
        for page, sentence, value in DEFAULTS:
            if name == f"docs/{page}.md":
                found = value()
                text = text.replace(sentence.format(*(found if isinstance(found, tuple) else (found,))), "")
        for decided in (*DECIDED, "| `lossless` (default) |"):
            text = text.replace(decided, "")
        found = CLAIM.search(text)
        assert not found, f"{name}: {text[found.start() - 60 : found.end() + 20]}: add what shows it to DEFAULTS"


@pytest.mark.parametrize("mode", [*modes.MODES])
def test_mode_settings_match_class(mode):
    kind = modes.mode_class(mode)
    (cells,) = re.findall(rf"^\| `{kind.__name__}` \| (.*) \|$", PAGES["docs/python.md"].read_text(), re.MULTILINE)
    named = re.fullmatch(r"as `(\w+)`", cells)
    settings = {item.name for item in dataclasses.fields(getattr(gearbx_mlx, named[1]))} if named else None
    assert (settings or set(re.findall(r"`(\w+)`", cells))) == {item.name for item in dataclasses.fields(kind)}


CALL = re.compile(r"`(?:gearbx_mlx\.)?([A-Z]\w+|[a-z]\w*)\((?:model, )?([^`]*)\)`")


def test_every_keyword_in_page_exists():
    checked = set()
    for name in PAGES:
        for called, given in CALL.findall(PAGES[name].read_text(encoding="utf-8")):
            if called not in gearbx_mlx.__all__:
                continue
            known = inspect.signature(getattr(gearbx_mlx, called)).parameters
            free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
            for keyword in re.findall(r"(?:^|, )(\w+)=", given):
                checked.add((called, keyword))
                assert free or keyword in known, f"{name}: {called} has no {keyword}"
    assert len(checked) >= 5


FLAG_VALUE = re.compile(r"(?<![\w-])(--[a-z][\w-]*)[ =]([a-z0-9][\w.,:-]*)")


@functools.cache
def actions(flag: str) -> list:
    """What commands do with a flag."""
    parsers = [
        import_module(f"gearbx_mlx.{command}").setup_arg_parser() for command in COMMANDS if command != "lm_eval"
    ]
    return [
        action
        for parser in parsers
        for each in (parser, *subparsers(parser))
        for action in each._actions
        if flag in action.option_strings
    ]


def subparsers(parser: argparse.ArgumentParser) -> list:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [each for action in found for each in action.choices.values()]


def test_flag_value_in_page_is_accepted():
    """Those with choices: `--mode static`, `--kernels mlx` and so on."""
    checked = set()
    for name in PAGES:
        for code in re.findall(r"`(--[^`]+)`", PAGES[name].read_text(encoding="utf-8")):
            for flag, value in FLAG_VALUE.findall(code):
                choices = [action.choices for action in actions(flag)]
                if choices and all(choices):
                    checked.add((flag, value))
                    assert any(value in each for each in choices), f"{name}: {flag} {value}"
    assert len(checked) >= 5


def test_page_names_missing_flags_of_mlx_lm():
    theirs, ours = (
        {flag for action in made._actions for flag in action.option_strings if flag.startswith("--")}
        for made in (import_module("mlx_lm.generate").setup_arg_parser(), generate_parser())
    )
    (named,) = re.findall("flags of `mlx_lm.generate`, except (.*?)\\.", text_of("docs/generate.md"))
    assert theirs - ours == set(re.findall("`(--.*?)`", named))


def bfloat16_model():
    return tiny_model(dtype=mx.bfloat16)


@pytest.mark.parametrize(
    ("gears", "how"),
    [
        ("16", {}),
        ("4,16", {"kernels": "mlx", "dtype": "bfloat16"}),
        ("4,8,16", {"kernels": "mlx", "dtype": "bfloat16"}),
    ],
)
def test_top_gear_is_mlx_lm_bit_for_bit(gears, how):
    """--gears 16 alone; --kernels mlx in the checkpoint's own type."""
    gearbox = Gearbox(bfloat16_model(), gears, **how)
    gearbox.shift(16)
    assert mx.array_equal(gearbox.model(PROMPT), bfloat16_model()(PROMPT)).item()


@pytest.mark.skipif(not on_cpu(), reason="a GPU keeps the type")
def test_bfloat16_gears_compute_in_float32_on_cpu():
    assert Gearbox(bfloat16_model(), "4,16", kernels="mlx").compute_dtype == mx.float32


OWN = "tests/docs/test_claims.py::test_top_gear_is_mlx_lm_bit_for_bit"
EXACT = "tests/formats/test_exact.py::test_weights_of_any_size_and_values"
# What a page claims to be bit for bit, and the test that shows it.
BIT_FOR_BIT = {
    "in one gear** (`Static`) each output equals that of `stream_generate` for its prompt, bit for bit": (
        "tests/decoding/test_batches.py::test_joining_and_leaving_outputs_equal_single_sequences"
    ),
    "stores bfloat16 weights bit for bit": EXACT,
    "keeps one copy of bfloat16 weights, bit for bit": EXACT,
    "mlx-lm's logits, bit for bit, at its speed": OWN,
    "The top gear is mlx-lm's, bit for bit, in the checkpoint's own type": OWN,
    "bit for bit with `--kernels mlx` in the checkpoint's own type": OWN,
    "The 16-bit gear has the original weights**, bit for bit": OWN,
    "each row of a batch with the same row alone, bit for bit": "gearbx_mlx/benchmark/metal_checks.py::batch_error",
    "The top gear's logits are the model's own, bit for bit": (
        "tests/docs/test_documents.py::test_models_page_rows_match_script"
    ),
}


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("research/")])
def test_every_bit_for_bit_claim_names_a_test(name):
    text = text_of(name)
    claimed = [claim for claim in BIT_FOR_BIT if claim.lower() in text.lower()]
    assert text.lower().count("bit for bit") == len(claimed), f"{name}: add what shows it to BIT_FOR_BIT"
    for claim in claimed:
        file, _, test = BIT_FOR_BIT[claim].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
