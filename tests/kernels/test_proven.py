"""Which Metal kernels were proven on this machine, and that nothing else of ours runs unasked."""

import json
import shutil
import warnings

import mlx.core as mx
import pytest
from conftest import every_gear, normal, tiny_model

from gearbx_mlx import Gearbox
from gearbx_mlx.errors import GearbxWarning
from gearbx_mlx.formats.exact import encode
from gearbx_mlx.kernels import dispatch, metal, products, proven, tuner
from gearbx_mlx.kernels.dispatch import METAL, MLX, NATIVE, RECONSTRUCT, KernelChoice, MatmulKind
from gearbx_mlx.kernels.exact import decode
from gearbx_mlx.kernels.metal_products import dense_launch
from gearbx_mlx.kernels.tuner import Tuner

KEY = proven.product_key("exact, group 64", (512, 256), mx.bfloat16, 1, NATIVE)
PLANES = MatmulKind("planes 4+4, group 64", (512, 256), stock=True)
EXACT = MatmulKind("exact, group 64", (512, 256), stock=False, variants=(NATIVE,), decoding=proven.decoder_key(64))


@pytest.fixture
def on_metal(monkeypatch, own_cache):
    """Metal seems to be here, and its compiler takes no text."""

    def refused(name: str, **text: object):
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nprogram_source:7:1: error")

    monkeypatch.setattr(metal, "available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", refused)
    monkeypatch.setattr(metal, "ACCEPTED", {})
    metal.build.cache_clear()
    yield
    metal.build.cache_clear()


def prove(kind: MatmulKind, vectors: int, **seconds: tuple[float, float]) -> None:
    """Seconds of ours and of MLX's, by candidate."""
    for candidate, (ours, mlx) in seconds.items():
        key = proven.product_key(kind.form, kind.shape, mx.bfloat16, vectors, candidate)
        proven.keep(key, proven.Proof(ours, mlx))


class TestFile:
    def test_keeps_proven_kernels(self, own_cache):
        assert proven.proof(KEY) is None
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        proven.keep(proven.decoder_key(64), proven.Proof(2.0, 1.0))
        assert proven.proof(KEY) == proven.Proof(1.0, 2.0)
        assert proven.won(KEY)
        assert proven.proof(proven.decoder_key(64)) is not None
        assert not proven.won(proven.decoder_key(64))
        proven.keep(KEY, None)
        assert proven.proof(KEY) is None
        assert not proven.any_won()

    def test_names_chip_system_mlx_and_source(self, own_cache):
        proven.metal_machine.cache_clear()
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        (machine,) = json.loads((own_cache / "proven.json").read_text())["machines"]
        assert machine.startswith(str(mx.device_info()["device_name"]))
        assert ", mlx " in machine
        assert machine.endswith(f", kernels {proven.kernels_hash()}")

    def test_entry_of_other_machine_stays_unused(self, own_cache, monkeypatch):
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        monkeypatch.setattr(proven, "metal_machine", lambda: "Apple M9, macOS 30.0, mlx 0.32.1")
        proven.proofs_in.cache_clear()
        assert not proven.any_won()
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        assert len(json.loads((own_cache / "proven.json").read_text())["machines"]) == 2
        proven.proofs_in.cache_clear()

    def test_entry_of_other_source_is_unused(self, own_cache, monkeypatch, tmp_path):
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        changed = shutil.copytree(metal.metal_folder(), tmp_path / "metal")
        (changed / "codes.metal").write_text("//")
        monkeypatch.setattr(proven, "metal_folder", lambda: changed)
        for cached in (proven.kernels_hash, proven.metal_machine, proven.proofs_in):
            cached.cache_clear()
        assert proven.proof(KEY) is None
        monkeypatch.undo()
        for cached in (proven.kernels_hash, proven.metal_machine, proven.proofs_in):
            cached.cache_clear()

    @pytest.mark.parametrize("content", [b"{", b'{"machines": {"a": {"b": {"ours": 0, "mlx": 1}}}}'])
    def test_corrupt_file_is_reported_and_rewritten(self, own_cache, content):
        (own_cache / "proven.json").write_bytes(content)
        with pytest.warns(GearbxWarning, match=r"proven\.json: .*benchmark mac"):
            assert not proven.any_won()
        proven.keep(KEY, proven.Proof(1.0, 2.0))
        assert proven.won(KEY)


class TestDefaultKernels:
    @pytest.fixture(autouse=True)
    def metal_tuner(self, monkeypatch, on_metal):
        monkeypatch.setenv("GEARBX_TUNE", "1")
        monkeypatch.setattr(tuner, "device", lambda: METAL)

    @staticmethod
    def chosen(kind: MatmulKind, vectors: int) -> str:
        def unmeasured(candidate: str):
            raise AssertionError(f"{candidate} was measured")

        return Tuner(mx.bfloat16, KernelChoice(True, "for a test")).choose(kind, vectors, unmeasured)

    def test_mlx_computes_without_proven_kernels(self):
        assert [self.chosen(PLANES, vectors) for vectors in (1, 5, 600)] == [MLX] * 3
        assert [self.chosen(EXACT, vectors) for vectors in (1, 5, 600)] == [MLX] * 3

    def test_proven_kernel_computes_its_shapes_and_counts(self):
        prove(PLANES, 1, registers=(1.0, 2.0), device=(0.5, 2.0))
        prove(PLANES, 4, registers=(2.0, 2.0))
        assert [self.chosen(PLANES, vectors) for vectors in (1, 2, 4)] == ["device", MLX, MLX]
        assert self.chosen(MatmulKind(PLANES.form, (512, 512), stock=True), 1) == MLX
        assert Tuner(mx.float16, KernelChoice(True, "for a test")).choose(PLANES, 1, lambda candidate: []) == MLX

    def test_a_proven_decoder_serves_prompts(self):
        proven.keep(EXACT.decoding, proven.Proof(1.0, 9.0))
        assert [self.chosen(EXACT, vectors) for vectors in (1, 2, 600)] == [MLX, RECONSTRUCT, RECONSTRUCT]

    def test_layers_use_own_kernels_only_after_proof(self):
        assert dispatch.choose("native").ours_alone
        assert not dispatch.choose("auto").native
        assert not dispatch.choose("mlx").native
        prove(PLANES, 1, registers=(1.0, 2.0))
        assert dispatch.choose("auto").native
        assert not dispatch.choose("auto").ours_alone


class TestUncompilableSource:
    def test_is_reported_once_and_not_retried(self, on_metal):
        weight = normal(32, 64)
        with pytest.warns(GearbxWarning, match=r"metal/dense\.metal does not run here .*Unable to build") as said:
            assert [dense_launch(normal(n, 64), weight).attempt() for n in (1, 1, 2)] == [None] * 3
        assert len(said) == 1
        assert [*metal.ACCEPTED.values()] == [False, False]

    def test_is_not_tried_inside_of_compile(self, on_metal):
        mx.fast.metal_kernel = lambda **text: lambda inputs, **how: [inputs[0] @ inputs[1].T]
        metal.build.cache_clear()
        weight, tried = normal(32, 64), []

        def step(x: mx.array) -> mx.array:
            tried.append(dense_launch(x, weight).attempt())
            return x

        mx.eval(mx.compile(step)(normal(1, 64)))
        assert tried == [None]
        assert metal.ACCEPTED == {}

    @pytest.mark.filterwarnings("ignore::gearbx_mlx.errors.GearbxWarning")
    def test_leaves_the_weights_of_format_exact_to_mlx(self, on_metal):
        proven.keep(proven.decoder_key(64), proven.Proof(1.0, 9.0))
        weight = normal(32, 128).astype(mx.bfloat16)
        matrix = encode(weight, 64)  # which decodes it
        chosen = mx.array([[3, 1]])
        assert mx.array_equal(products.exact_rows(matrix, chosen), weight[chosen]).item()
        assert mx.array_equal(decode(matrix), weight).item()
        assert [spec.layout.text for spec in metal.ACCEPTED] == ["exact"]

    @pytest.mark.parametrize("format", ["planes", "affine", "rowwise", "groupwise", "codebook", "codebook-library"])
    def test_leaves_a_model_to_mlx(self, on_metal, format, monkeypatch):
        """As if every kernel had been proven by a compiler that takes none any more."""
        monkeypatch.setattr(proven, "proof", lambda key: proven.Proof(1e-9, 1.0))
        monkeypatch.setattr(proven, "any_won", lambda: True)
        model, tokens = tiny_model("qwen2"), mx.array([[7, 3, 5]])
        ours = Gearbox(model, "4,16", format=format, kernels="auto")
        assert ours.kernels.native
        stock = Gearbox(tiny_model("qwen2"), "4,16", format=format, kernels="mlx")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in every_gear(ours, stock):
                wanted, found = stock.model(tokens), ours.model(tokens)
                assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4).item()
        assert len([each for each in said if "does not run here" in str(each.message)]) == 2  # packed and dense
