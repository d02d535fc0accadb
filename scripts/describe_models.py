"""Write the table of docs/models.md: gears of each class of mlx_lm.models, found with tiny random instances.

python scripts/describe_models.py            # all of them, within minutes
python scripts/describe_models.py --check    # writes nothing; fails if a row of the page is wrong
python scripts/describe_models.py --check llama mamba
"""

import argparse
import difflib
import sys
import warnings
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_tokenizer
from pages import BLOCK, table

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, Static, stream_generate
from gearbx_mlx.decoding.caches import parts
from gearbx_mlx.loading import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # where the instances are

from architectures import BYTES, GROUP, UNBUILDABLE, as_initialised, installed, tiny, why_not  # noqa: E402
from architectures.reading import matrices  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = ["class", "layers that change gear", "layers that do not", "lossless", "caches", "notes"]
PROMPT = [1, 5, 9, 2, 7, 3, 8, 1, 60, 70, 100, 12]
LENGTH = 24


def row(name: str, tokenizer: Any) -> list[str]:
    """Return the cells of a class."""
    reason = why_not(name)
    notes = [note for note in (reason, BYTES.get(name)) if note]
    if name in UNBUILDABLE:
        return [f"`{name}`", "", "", "", "", reason or ""]
    model = tiny(name) if reason is None else as_initialised(name)
    caches = sorted({type(part).__name__ for part in parts(make_prompt_cache(model))})
    try:
        gearbox = Gearbox(model, "4,8,16", group_size=GROUP, kernels="mlx")
    except GearbxError as error:
        return [f"`{name}`", "0", "", "not run here", ", ".join(caches), "; ".join([*notes, str(error)])]
    holders = {path.rpartition(".")[0] for path in gearbox.unmanaged}  # of parameters that do not belong to layers
    unreported = matrices(model) - {layer.path for layer in gearbox.layers} - gearbox.unmanaged.keys() - holders
    others = gearbox.unmanaged | dict.fromkeys(sorted(unreported), "no layer of its own")
    text = "not run here" if reason else lossless(model, gearbox, tokenizer, notes)
    return [f"`{name}`", kinds(gearbox), by_reason(others), text, ", ".join(caches), "; ".join(notes)]


def kinds(gearbox: Gearbox) -> str:
    """Return the number of an instance's layers that change gear, and the number of experts among them."""
    experts = sum(isinstance(layer.module, SwitchLinear) for layer in gearbox.layers)
    return f"{len(gearbox.layers)}, {experts} of them experts" if experts else str(len(gearbox.layers))


def by_reason(others: dict[str, str]) -> str:
    """Return the names of layers by the reason why they keep their precision."""
    names: dict[str, set[str]] = {}
    for path, reason in others.items():
        words = [word for word in path.split(".") if word and not word.isdigit()]
        names.setdefault(reason, set()).add(f"`{words[-1]}`" if words else "the model itself")
    return "; ".join(f"{', '.join(sorted(found))}: {reason}" for reason, found in sorted(names.items()))


def lossless(model: nn.Module, gearbox: Gearbox, tokenizer: Any, notes: list[str]) -> str:
    """Return the result of mode lossless; a warning becomes a note."""
    top = [r.token for r in stream_generate(model, tokenizer, PROMPT, LENGTH, mode=Static(), gearbox=gearbox)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GearbxWarning)
        try:
            mode = Lossless(draft_length=4)
            responses = list(stream_generate(model, tokenizer, PROMPT, LENGTH, mode=mode, gearbox=gearbox))
        except GearbxError as error:
            notes.append(str(error))
            return "refused"
    notes += [str(warning.message) for warning in said]
    if [r.token for r in responses] != top:
        return "differs"
    return "drafts" if any(r.drafted for r in responses) else "the top gear alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="Classes to look at; all of them by default.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where the page says something else.")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer.eos_token_ids = set()
    names = arguments.names or installed()
    made = table(HEAD, [row(name, tokenizer) for name in sorted(names, key=str.lower)]).splitlines()
    page = PAGE.read_text(encoding="utf-8")
    there = next(match.group() for match in BLOCK.finditer(page) if match[2] == "models").splitlines()[1:-1]
    if arguments.names:  # the rest stays as it is
        mine = {line.split("|")[1]: line for line in made}
        made = [mine.get(line.split("|")[1], line) for line in there]
    if arguments.check:
        difference = list(difflib.unified_diff(there, made, "docs/models.md", "found", lineterm="", n=0))
        sys.exit("\n".join(difference) or 0)
    PAGE.write_text(page.replace("\n".join(there), "\n".join(made)), encoding="utf-8")


if __name__ == "__main__":
    main()
