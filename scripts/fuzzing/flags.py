"""Values for every flag that the parsers have: good ones, those at and beyond its bounds, and hostile text.

Bounds, choices and types are those of the settings' fields, so that a new flag is tried without a change here. GOOD has
words for flags that only their names explain.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gearbx_mlx.settings import flag_of, flags_in

from .cases import STRANGE, Case
from .inputs import MODELS

PATHS: tuple[str, ...] = (*STRANGE, "missing", "no/such/file", "/dev/null", "/dev/full", "/proc", ".", "prompts.txt")
PATHS += ("gsm8k.jsonl", "manifest.json", "thresholds.json", "cache.safetensors", "llama/model.safetensors")
PATHS += ("geared", "evaluation")
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "-",
    "--",
    "-h",
    "\t",
    "\n",
    "a\nb",
    "x" * 300,
    "é漢🙂",
    "\u202e",
    "\udcff",
    "nan",
    "inf",
)
TEXTS += ("-1", "0", ",", "1,", "4,8,16", "1e999", "None", "{}", "[]", '{"a": 1}', "%s%n", "~", "$HOME", "*", "[red]")
TEXTS += ("\x1b[31m", "low")
TEXTS += ("nobody/nothing", "a/b/c", "٣", "1_0", "0x10", "16,16", "2,3,4,5,6,8,16", "1e-400", "10" * 200)
NUMBERS = (0, -1, 1, 10**20, -(10**20), 2**31, 2**63)
FLOATS = ("nan", "inf", "-inf", "1e-300", "1e300", "1e-46", "-0.0", "0.5")
SMALL = (0, 1, 7, 15)  # beyond the least: lengths that take little work

LADDERS = ("4,8,16", "4,16", "3,8", "16", "8", "2,16", "2,4", "3,4,5,6,8,16")
OUTPUTS = ("out", "out.json", "llama", "prompts.txt", "a_directory")
PROMPTS = ("prompts.txt", "prompts.jsonl", "gsm8k.jsonl")
GOOD: dict[str, Sequence[str]] = {
    **dict.fromkeys(("model", "small_model", "draft_model"), ("llama", "geared", *MODELS)),
    "base": ("", "text.txt", "gsm8k.jsonl", "quantized"),
    "residency": ("resident", "disk", "disk:8GB", "stream"),
    "kernels": ("auto", "mlx", "native:float", "auto:int8", "dequant-cache"),
    "verbose": ("True", "False", "all"),
    **dict.fromkeys(("restore", "verify"), ("exact", "geared")),
    "prompts": PROMPTS,
    **dict.fromkeys(("out", "trace", "summary", "json", "mlx_path"), OUTPUTS),
    **dict.fromkeys(("gears", "bits"), LADDERS),
    "gear": ("low", "mid", "high", "4", "16", "small", "large", "auto"),
    "adapter_path": ("adapter",),
    "data": ("text.txt", "gsm8k.jsonl", "prompts.jsonl"),
    "thresholds": ("1,2", "8", "thresholds.json", "inf,1,0.5,0"),
    "manifest": ("manifest.json",),
    "prompt_cache_file": ("cache.safetensors",),
    "chat_template_config": ('{"a": 1}', "{}"),
    "extra_eos_token": ("<|endoftext|>", "the", "a"),
    "auto_bits": ("0.9", "0.99,0.9"),
    "shares": ("0.6,0.3,0.1", "0.5,0.5"),
    "shape": ("256x1", "256x2"),
    "memory_budget": ("1MB", "3GB"),
    "target_bpw": ("4.5", "5,6", "2.5"),
    "target_tps": ("0", "5", "1,2", "100"),
    "revision": ("main",),
    "upload_repo": ("nobody/nothing",),
    "server": ("http://127.0.0.1:9/v1", "http://[::1]:9"),
    "prompt": ("Once", "How many? " * 20, "-", "<|endoftext|>"),
}


@dataclass(frozen=True)
class Flag:
    """A flag: how it is written, and strategies for the texts of its values."""

    name: str
    good: st.SearchStrategy[str]
    odd: st.SearchStrategy[str]
    takes: str = "one"  # value: one, none, several
    always: bool = False

    def written(self, value: str, more: str) -> list[str]:
        """The flag as arguments: as one with its value, which may begin with a dash."""
        if self.takes == "none":
            return [self.name]
        return [self.name, value, more] if self.takes == "several" else [f"{self.name}={value}"]


TAKES = {None: "one", "+": "several", "?": "one"}


@dataclass(frozen=True)
class Parser:
    """A command, the words before its flags, and its flags."""

    name: str
    before: tuple[str, ...]
    flags: tuple[Flag, ...]


def parsers_of(command: str) -> list[Parser]:
    """Return the parsers of a command: one, or one for each subcommand; none of lm_eval, whose flags are not ours."""
    if command == "lm_eval":
        return []
    module = import_module(f"gearbx_mlx.{command}")
    kind = module.setup_arg_parser().kind
    if get_origin(kind) is UnionType:
        return [Parser(command, (part.what,), tuple(flags_of(part))) for part in get_args(kind)]
    groups = get_type_hints(kind).values()
    return [Parser(command, (), tuple(flag for group in groups for flag in flags_of(group)))]


def flags_of(group: type) -> Iterator[Flag]:
    types = get_type_hints(group)
    for item in flags_in(group).values():
        kind = next(part for part in get_args(types[item.name]) or (types[item.name],) if part is not NoneType)
        yield flag_for(item, kind)


def flag_for(item: Field, kind: type) -> Flag:
    """A flag from its field of the settings. A length whose default takes long is always given."""
    rules = item.metadata
    least, most = rules.get("bounds", (None, math.inf))
    always = item.default is MISSING or item.name == "model"
    takes = TAKES[rules.get("nargs")] if rules["parse"] or kind is not bool else "none"
    if choices := rules["choices"]:
        good = st.sampled_from([str(choice) for choice in choices])
    elif kind is int:
        low = 1 if least is None else int(least)
        good = st.sampled_from([str(low + more) for more in SMALL if low + more <= most])
        always = always or (isinstance(item.default, int) and item.default > SMALL[1])
    elif item.name in GOOD:
        good = st.sampled_from(GOOD[item.name])
    elif kind is float:
        lowest, highest = 0.0 if least is None else least, 10.0 if math.isinf(most) else most
        good = st.floats(lowest, highest).map(str)
    else:
        good = st.sampled_from([str(item.default), "True", *TEXTS[-8:]])
    edges = [str(number) for bound in (least, most) if is_number(bound) for number in around(bound, kind)]
    odd = st.sampled_from([*edges, *map(str, NUMBERS), *FLOATS]) if kind in (int, float) else st.sampled_from(PATHS)
    return Flag(flag_of(item.name), good, odd | st.sampled_from(TEXTS), takes, always)


def is_number(bound: float | None) -> bool:
    return bound is not None and math.isfinite(bound)


def around(bound: float, kind: type) -> tuple[float, ...]:
    """A bound and what is beyond it on either side."""
    if kind is int:
        return int(bound) - 1, int(bound), int(bound) + 1
    return math.nextafter(bound, -math.inf), bound, math.nextafter(bound, math.inf)


@st.composite
def commands(draw: st.DrawFn, parser: Parser) -> Case:
    """A command with a few flags, one of which may have an odd value."""
    chosen = draw(st.lists(st.sampled_from(parser.flags), max_size=5, unique_by=lambda flag: flag.name))
    flags = [flag for flag in parser.flags if flag.always and flag not in chosen] + chosen
    odd = draw(st.sampled_from([None, *chosen]))
    written = []
    for flag in flags:
        values = flag.odd if flag is odd else flag.good
        written += flag.written(draw(values), draw(values) if flag.takes == "several" else "")
    return Case(parser.name, (*parser.before, *written))
