"""What a gearbox does to types and memory, and which bytes it counts."""

import shutil
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from conftest import (
    ARCHITECTURES,
    PROMPT,
    active_memory,
    every_gear,
    linear_layers,
    on_disk,
    same_weights,
    save_model,
    tiny_model,
    weights_of,
)
from refusals import assert_refused

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Observer, convert, load
from gearbx_mlx.formats import get_format
from gearbx_mlx.gears.cost import break_even_tokens, needed_memory, read_files, whole_model_speedup
from gearbx_mlx.gears.offload import glibc, large_pages
from gearbx_mlx.kernels import device, metal
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.settings import human_bytes


class TestDtype:
    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
    def test_half_precision_computes_in_float32_on_cpu(self, dtype):
        model = tiny_model(dtype=dtype)
        before = weights_of(model)
        gearbox = Gearbox(model, "4,8,16")
        expected = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else dtype
        assert gearbox.compute_dtype == expected
        assert same_weights(weights_of(model), before)
        assert gearbox.bits_per_weight(gearbox.ladder.top) == 16.0
        gearbox.shift("low")
        assert gearbox.bits_per_weight(gearbox.gear) == 4.5
        assert model(PROMPT).dtype == expected

    def test_single_dense_gear_changes_no_dtype(self):
        model = tiny_model(dtype=mx.bfloat16)
        assert Gearbox(model, "16").compute_dtype == mx.bfloat16
        assert model(PROMPT).dtype == mx.bfloat16

    def test_parameters_of_other_dtype_are_restored(self):
        model = tiny_model(dtype=mx.bfloat16)
        model.model.norm.weight = mx.random.normal((64,))
        before = weights_of(model)
        Gearbox(model, "4,16")
        Gearbox(model, "16")
        assert model.model.norm.weight.dtype == mx.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16
        assert same_weights(weights_of(model), before)


class TestResidency:
    @pytest.mark.some(1)
    @pytest.mark.parametrize("residency", ["resident", "disk"])
    def test_idle_gears_leave_mlx_memory(self, fresh_demo, residency):
        gearbox = Gearbox(fresh_demo.model, "4,8,16", residency=residency, checkpoint=DEMO_MODEL, kernels="mlx")
        dense = sum(layer.module.weight.nbytes for layer in gearbox.layers)
        before = active_memory()
        gearbox.shift("low")
        # Held in float32 here: both planes and three numbers per group.
        packed = dense * 9.5 / 32
        gained = gearbox.active_memory["low"] - before
        leaves = dense - fresh_demo.model.model.embed_tokens.weight.nbytes  # whose rows go in as they are
        assert gained == pytest.approx(packed if residency == "resident" else packed - leaves, abs=0.02 * dense)
        gearbox.shift("high")
        gained = active_memory() - before
        assert gained == pytest.approx(packed, abs=0.02 * dense)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_disk_reads_every_architecture_back(self, architecture, tmp_path):
        model = tiny_model(architecture)
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights_of(model))
        model.load_weights(list(getattr(model, "sanitize", dict)(weights_of(model)).items()))
        before = weights_of(model)
        gearbox = Gearbox(model, "4,16", residency="disk", checkpoint=tmp_path)
        for gear in ("low", "high", "low", "high"):
            gearbox.shift(gear)
        assert same_weights(weights_of(model), before)

    def test_disk_without_checkpoint_layers_is_refused(self, tiny):
        with pytest.raises(GearbxError, match=r"is not in the checkpoint; use residency resident"):
            Gearbox(tiny, residency="disk", checkpoint=DEMO_MODEL, manage=lambda path, m: "lm_head" in path)

    def test_missing_checkpoint_leaves_gear_unchanged(self, tmp_path):
        copied = shutil.copytree(DEMO_MODEL, tmp_path / "model")
        model, _ = mlx_lm.load(str(copied))
        gearbox = Gearbox(model, "4,16", residency="disk", checkpoint=copied)
        gearbox.shift("low")
        before = weights_of(model)
        shutil.rmtree(copied)
        with pytest.raises(GearbxError, match=r"no model\*\.safetensors to read weights back from"):
            gearbox.shift("high")
        assert gearbox.gear.name == "low"
        assert same_weights(weights_of(model), before)


# A model with some 100 MB of linear layers, which shifts between gears; it prints the size of the process.
RESIDENT_SET = """
import sys
from pathlib import Path
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from gearbx_mlx import Gearbox
sizes = dict(hidden_size=256, num_hidden_layers=30, intermediate_size=768, num_attention_heads=8, num_key_value_heads=8)
model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=512, **sizes))
directory = Path(sys.argv[1])
mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
gearbox = Gearbox(model, "4,16", residency="disk", checkpoint=directory, kernels="mlx")
for gear in ("low", "high") * 2:
    gearbox.shift(gear)
    mx.eval(model.parameters())
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
print(sum(layer.module.weight.nbytes for layer in gearbox.layers) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(glibc() is None, reason="memory is glibc's to give back")
def test_residency_disk_gives_memory_back_to_the_system(tmp_path):
    done = subprocess.run([sys.executable, "-c", RESIDENT_SET, tmp_path], capture_output=True, text=True, check=True)
    *_, low, high, dense = map(int, done.stdout.split())
    assert dense > 80_000
    assert high - low > 0.9 * dense


def test_large_pages_beyond_process_limit_are_ignored():
    with large_pages(1 << 60):
        assert mx.ones(4).sum().item() == 4


class TestDoubleQuantization:
    @pytest.mark.parametrize("bits", [2, 4])
    def test_previously_quantized_weights_are_warned_about(self, bits):
        model = tiny_model()
        for layer in linear_layers(model).values():
            layer.weight = mx.dequantize(*mx.quantize(layer.weight, 64, bits), 64, bits)
        with pytest.warns(GearbxWarning, match="quantized before"):
            Gearbox(model)

    def test_8_bit_rows_are_noticed_in_long_rows(self):
        from gearbx_mlx.gears.sources import looks_quantized

        weight = mx.random.normal((64, 4096)).astype(mx.bfloat16)
        rounded = mx.round(weight.astype(mx.float32) * 31) / 31
        assert looks_quantized([rounded])
        assert not looks_quantized([weight])


class TestCost:
    def test_a_tied_embedding_is_read_as_the_head(self, fresh_demo):
        gearbox = Gearbox(fresh_demo.model)
        expected = sum(a.size * 2 for a in weights_of(fresh_demo.model).values())  # stored in bfloat16
        assert gearbox.weight_bytes_per_token(gearbox.ladder.top) == expected

    def test_cost_is_same_in_every_gear(self, tiny, tmp_path):
        gearbox = Gearbox(tiny)
        before = [gearbox.weight_bytes_per_token(gear) for gear in gearbox.ladder]
        other = Gearbox(tiny_model(), **on_disk(tiny_model(), tmp_path))
        other.shift("low")
        assert [other.weight_bytes_per_token(gear) for gear in other.ladder] == before
        assert before == sorted(before)

    def test_formulas_of_the_paper(self):
        assert whole_model_speedup(0.35, 4) == pytest.approx(1.356, abs=1e-3)  # "about 1.4x"
        assert whole_model_speedup(0, 4) == 1
        assert whole_model_speedup(1, 4) == 4
        assert break_even_tokens(0.003, 0.03, 0.02) == pytest.approx(0.3)
        assert break_even_tokens(0.003, 0.02, 0.02) is None


def test_observer_and_gearbox_count_same_layers(fresh_demo):
    observed = Observer(fresh_demo.model, "16")
    gearbox = Gearbox(fresh_demo.model, "16")
    assert len(observed.unmanaged) == len(gearbox.layers) == 43  # the tied output head is the 43rd
    assert observed.bits_per_weight(observed.gear) == gearbox.bits_per_weight(gearbox.gear) == 16
    assert observed.weight_bytes_per_token(observed.gear) == gearbox.weight_bytes_per_token(gearbox.gear)


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
    for _ in every_gear(gearbox):
        found |= {id(array): array for array in weights_of(gearbox.model).values()}
    return sum(array.nbytes for array in found.values())


@pytest.mark.parametrize(
    ("format", "gears"),
    [("planes", "4,8,16"), ("planes", "3,4"), ("affine", "4,8,16"), ("rowwise", "4,8,16"), ("groupwise", "4,16")],
)
def test_gear_sizes_are_known_from_files(directory, format, gears):
    gearbox = Gearbox(load(directory)[0], gears, format=format, kernels="mlx")
    bits = [gear.bits for gear in gearbox.ladder]
    needed = needed_memory(read_files(directory), bits, get_format(format), 64, resident=True)
    assert needed == pytest.approx(bytes_in(gearbox), rel=0.02)


def test_matrices_beside_groups_are_counted_whole(tmp_path):
    path = tmp_path / "model"
    save_model(tiny_model(intermediate_size=96), path)
    gearbox = Gearbox(load(path)[0], "4,8", kernels="mlx")
    needed = needed_memory(read_files(path), [4, 8], get_format("planes"), 64, resident=True)
    assert needed == pytest.approx(bytes_in(gearbox), rel=0.02)


def test_checkpoint_gears_are_counted_in_its_files(directory, tmp_path):
    out = convert(directory, tmp_path / "geared", gears="4,8,16")
    for gears in ("4", "4,8", "4,8,16"):
        bits = [int(part) for part in gears.split(",")]
        needed = needed_memory(read_files(out), bits, get_format("planes"), 64, resident=True)
        assert needed == pytest.approx(bytes_in(Gearbox(load(out)[0], gears, kernels="mlx")), rel=0.02)


def test_gears_of_one_copy_need_all_of_it():
    files, exact = read_files(DEMO_MODEL), get_format("exact")
    both = needed_memory(files, [4, 16], exact, 64, resident=True)
    assert needed_memory(files, [4, 16], exact, 64, resident=False) == both


def test_model_beyond_memory_is_named_with_fitting_gears(succeeds, room):
    files, planes = read_files(DEMO_MODEL), get_format("planes")
    all_gears, low = (needed_memory(files, bits, planes, 64, resident=True) for bits in ([4, 8, 16], [4, 8]))
    room(low + 1)
    done = succeeds("generate", "--mode", "route", "--max-tokens", 1, "--verbose", "False")
    sizes = f"about {all_gears / 1e6:.3g} MB exceed the {(low + 1) / 1e6:.3g} MB recommended for this GPU"
    remedy = f"use --gears 4,8 ({low / 1e6:.3g} MB)"  # with --residency disk the original alone would not fit
    assert f"warning: demo: {sizes}; {remedy}\n" in done.err


def one_copy(limit: int) -> str:
    """The remedies for the demo model on a GPU that recommends so many bytes."""
    files = read_files(DEMO_MODEL)
    sizes = {"--gears 16": files.total, "--format exact": needed_memory(files, [4, 16], get_format("exact"), 64, True)}
    for bits in (8, 6, 4):
        sizes[f"--mode static --gears {bits}"] = needed_memory(files, [bits], get_format("planes"), 64, True)
    return " or ".join(f"{way} ({human_bytes(size)})" for way, size in sizes.items() if size <= limit)


def test_draft_beyond_memory_is_named_with_alternative(succeeds, room, monkeypatch):
    whole = needed_memory(read_files(DEMO_MODEL), [4, 16], get_format("affine"), 64, True)
    monkeypatch.setattr(metal, "available", lambda: True)
    room(whole - 1)
    done = succeeds("generate", "--max-tokens", 1, "--verbose", "False")
    sizes = f"about {human_bytes(whole)} exceed the {human_bytes(whole - 1)} recommended for this GPU"
    assert f"demo: {sizes}; use {one_copy(whole)}\n" in done.err


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.1])
def test_model_beyond_recommended_memory_is_refused_unread(command, monkeypatch, share):
    limit, flags = int(read_files(DEMO_MODEL).total * share), ("--gears", "16") if share == 0.6 else ()
    needed = needed_memory(read_files(DEMO_MODEL), [16] if flags else [4, 16], get_format("affine"), 64, True)
    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *device: {LIMIT: limit, "memory_size": 10**12})
    monkeypatch.setattr("gearbx_mlx.cli.build.load_model", lambda *arguments: pytest.fail("it was read"))
    done = command("generate", "--max-tokens", 1, *flags)
    sizes = f"about {human_bytes(needed)} exceed the {human_bytes(limit)} recommended for this GPU"
    assert_refused(done, f"demo: {sizes}; use {one_copy(limit) or 'a smaller model'}")


def test_model_beyond_mac_memory_is_refused_unread(command, monkeypatch):
    size = read_files(DEMO_MODEL).total
    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *device: {LIMIT: size // 2, "memory_size": size - 1})
    monkeypatch.setattr("gearbx_mlx.cli.build.load_model", lambda *arguments: pytest.fail("it was read"))
    done = command("generate", "--max-tokens", 1)
    sizes = f"{human_bytes(size)} of weights exceed this machine's {human_bytes(size - 1)} of memory"
    assert_refused(done, f"demo: {sizes}; use a checkpoint in fewer bits, or a smaller model")


def test_a_pair_is_counted_together(command, room):
    both = 2 * read_files(DEMO_MODEL).total
    room(both - 1)
    done = command("generate", "--small-model", DEMO_MODEL, "--max-tokens", 1, "--verbose", "False")
    assert f"the pair of {DEMO_MODEL} and demo: about {both / 1e6:.3g} MB exceed the" in done.err
    room(both)
    done = command("generate", "--small-model", DEMO_MODEL, "--max-tokens", 1, "--verbose", "False")
    assert "exceed the" not in done.err


def test_loaded_model_is_wired_once_with_room_beside(room, monkeypatch):
    monkeypatch.setattr(device, "_wired", 0)
    room(16 * 10**9)
    device.wire(3 * 10**9)
    assert room.wired == 5 * 10**9
    device.wire(10**9)  # another model of the process
    assert room.wired == 5 * 10**9
    device.wire(15 * 10**9)
    assert room.wired == 16 * 10**9
