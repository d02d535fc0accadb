"""Files tell how much memory gears will need; a GPU limit that is too low is named before the model is loaded."""

import mlx.core as mx
import pytest
from conftest import save_model, tiny_model, weights_of

from gearbx_mlx import Gearbox, convert, evaluate, load
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.cost import needed_memory, read_files
from gearbx_mlx.kernels.device import wired_memory
from gearbx_mlx.loading import DEMO_MODEL

LIMIT = "max_recommended_working_set_size"


@pytest.fixture
def room(monkeypatch):
    """Says how many bytes a GPU should have at most; `wired` is the limit that is set."""

    class Room:
        wired = 7

        def set_limit(self, limit: int) -> int:
            before, self.wired = self.wired, limit
            return before

        def __call__(self, most: int) -> None:
            monkeypatch.setattr(mx, "device_info", lambda *device: {LIMIT: most})

    made = Room()
    monkeypatch.setattr(mx, "set_wired_limit", made.set_limit)
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("room") / "model"
    save_model(tiny_model(), path)
    return path


def bytes_in(gearbox: Gearbox) -> int:
    """The bytes of all arrays of all gears of a model."""
    found: dict[int, mx.array] = {}
    for gear in gearbox.ladder:
        gearbox.shift(gear)
        found |= {id(array): array for array in weights_of(gearbox.model).values()}
    return sum(array.nbytes for array in found.values())


@pytest.mark.parametrize(
    ("format", "gears"),
    [("planes", "4,8,16"), ("planes", "3,4"), ("affine", "4,8,16"), ("rowwise", "4,8,16"), ("groupwise", "4,16")],
)
def test_what_gears_need_is_known_from_the_files(directory, format, gears):
    gearbox = Gearbox(load(directory)[0], gears, format=format, kernels="mlx")
    bits = [gear.bits for gear in gearbox.ladder]
    needed = needed_memory(read_files(directory), bits, get_format(format), 64, resident=True)
    assert needed == pytest.approx(bytes_in(gearbox), rel=0.02)


def test_the_gears_of_a_checkpoint_are_counted_in_its_files(directory, tmp_path):
    out = convert(directory, tmp_path / "geared", gears="4,8,16")
    for gears in ("4", "4,8", "4,8,16"):
        bits = [int(part) for part in gears.split(",")]
        needed = needed_memory(read_files(out), bits, get_format("planes"), 64, resident=True)
        assert needed == pytest.approx(bytes_in(Gearbox(load(out)[0], gears, kernels="mlx")), rel=0.02)


def test_a_model_that_does_not_fit_is_named_with_gears_that_would(command, room):
    files, planes = read_files(DEMO_MODEL), get_format("planes")
    all_gears, low = (needed_memory(files, bits, planes, 64, resident=True) for bits in ([4, 8, 16], [4, 8]))
    room(low + 1)
    done = command("generate", "--mode", "route", "--max-tokens", 1, "--verbose", "False")
    assert done.status == 0
    most = f"and this GPU should have at most {low / 1e6:.3g} MB"
    remedies = f"--gears 4,8 ({low / 1e6:.3g} MB) would fit"  # and with --residency disk the original alone would not
    assert f"warning: demo needs about {all_gears / 1e6:.3g} MB, {most}: {remedies}\n" in done.err


@pytest.mark.slow
def test_one_gear_at_a_time_fits_where_all_do_not(command, room):
    room(needed_memory(read_files(DEMO_MODEL), [16], get_format("planes"), 64, resident=True))
    done = command("generate", "--mode", "route", "--max-tokens", 1, "--verbose", "False")
    assert "or --residency disk would fit" in done.err
    done = command("generate", "--max-tokens", 1, "--verbose", "False", "--residency", "disk")
    assert "needs about" not in done.err


def test_a_pair_is_counted_together(command, room):
    both = 2 * read_files(DEMO_MODEL).total
    room(both - 1)
    done = command("generate", "--small-model", DEMO_MODEL, "--max-tokens", 1, "--verbose", "False")
    assert f"the pair of {DEMO_MODEL} and demo needs about {both / 1e6:.3g} MB, and this GPU should have" in done.err
    room(both)
    done = command("generate", "--small-model", DEMO_MODEL, "--max-tokens", 1, "--verbose", "False")
    assert "needs about" not in done.err


def test_a_model_that_fits_is_not_mentioned(command, room):
    room(2**40)
    assert "needs about" not in command("generate", "--max-tokens", 1).err


def test_nothing_is_said_on_a_device_without_a_limit(command):
    assert "needs about" not in command("generate", "--max-tokens", 1).err


def test_memory_is_wired_within_and_not_behind(room):
    room(12345)
    with wired_memory():
        assert room.wired == 12345
    assert room.wired == 7


@pytest.mark.slow
def test_memory_is_wired_while_a_text_is_evaluated(demo, room, monkeypatch, tmp_path):
    room(2**40)
    seen = []
    compute = type(demo.model).__call__
    monkeypatch.setattr(
        type(demo.model), "__call__", lambda self, *args, **kw: (seen.append(room.wired), compute(self, *args, **kw))[1]
    )
    text = tmp_path / "text.txt"
    text.write_text("A baker makes 36 rolls in the morning. " * 4)
    evaluate(text, out=tmp_path / "out", gears="4,16", modes=["none"], tokens=8, context=8, kernels="mlx")
    assert set(seen) == {2**40}
    assert room.wired == 7
