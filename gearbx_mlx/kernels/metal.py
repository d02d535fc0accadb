"""Metal kernels through `mx.fast.metal_kernel`: source, availability, variants and launches.

Macros specialize a source file of metal/ to a kernel. A launch is prepared once for input shapes and then called for
each matmul, because preparing takes longer than a call. Import builds no kernel, and only a call needs a Mac: a launch
can be examined anywhere.
"""

import functools
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import GearbxError, GearbxWarning, one_line

TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}  # MLX's names in Metal source
UNROLL = '_Pragma("clang loop unroll(full)")'  # only unrolled loops keep a lane's arrays in registers
UNREAD = re.compile(r"[ \t]*//[^\n]*|[ \t]+(?=\\\n)")  # comments, and spaces before the end of a macro's line


def source_text(name: str) -> str:
    """Return the text of metal/<name>.metal."""
    file = metal_folder() / f"{name}.metal"
    if not file.is_file():
        raise GearbxError(f"metal/{name}.metal: missing from this installation; install gearbx-mlx again")
    return file.read_text(encoding="utf-8")


def metal_folder() -> Path:
    """Return the folder of the Metal sources, in the installed package or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next((each for each in (package / "metal", package.parent / "metal") if each.is_dir()), package / "metal")


def without_comments(text: str) -> str:
    """Return the same program in fewer bytes, because MLX copies and hashes a kernel's source at each launch."""
    return "\n".join(line for line in UNREAD.sub("", text).splitlines() if line.strip()) + "\n"


LANES = 32  # per SIMD group
MAX_VECTORS = 16
METAL_DTYPES = tuple(TYPES)

# The largest activations in threadgroup memory (GEARBX 8.1).
STAGED_COLUMNS = 6144
STAGED_BYTES = 24 * 1024

# MLX passes smaller arrays in the "constant" address space. The kernels do not read it.
MIN_ELEMENTS = 8


def available() -> bool:
    """Return whether `Launch.run` can run on MLX's default device."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def check_available() -> None:
    """Validate that Metal kernels can run.

    Raises:
        GearbxError: MLX has no Metal device, or its default device is the CPU.
    """
    if available():
        return
    if mx.metal.is_available():
        raise GearbxError("Metal kernels: MLX's default device is the CPU; set it to the GPU")
    raise GearbxError("Metal kernels: this MLX has no Metal device; use a Mac with Apple silicon")


@dataclass(frozen=True)
class Variant:
    """The memory of activations, and the number of rows of a SIMD group.

    name: memory from which lanes read activations: `registers`, `threadgroup` or `device`. simd_groups: per
    threadgroup. rows: per SIMD group.
    """

    name: str
    simd_groups: int
    rows: int


VARIANTS = ("registers", "threadgroup", "device")


def choose_variant(bits: int, vectors: int, name: str | None = None) -> Variant:
    """Return the variant with this name, or the expected one. Results of all variants are bit-identical.

    `registers` follows MLX's qmv_fast and llama.cpp: 2 SIMD groups of 4 rows, with activations in registers. Three or
    more vectors fill the registers, so it then has 2 rows. The others follow GEARBX 8.1 and 8.2: 8 SIMD groups of
    2 rows. They have 1 row for 2-bit codes, whose unpacking takes most of the time.
    """
    name = name or expected_variant(vectors)
    if name == "registers":
        return Variant(name, 2, 4 if vectors <= 2 else 2)
    return Variant(name, 8, 1 if bits <= 2 else 2)


def expected_variant(vectors: int) -> str:
    """Return the variant that is expected to be fastest, without a measurement.

    The two fastest published kernels resemble `registers`, which has no room for more than 8 vectors.
    """
    return "registers" if vectors <= 8 else "device"


def fitting_variants(names: Sequence[str], columns: int, vectors: int, dtype: mx.Dtype) -> list[str]:
    """Return the variants that take activations of this size: `threadgroup` must have room for all of them."""
    fits = columns <= STAGED_COLUMNS and columns * vectors * dtype.size <= STAGED_BYTES
    return [name for name in names if name != "threadgroup" or fits]


@dataclass(frozen=True)
class WeightLayout:
    """The packing of a matrix, as buffers and macros of a source file.

    name: unique. bits: of a code, over all planes. arrays: names of the buffers, of which the first `planes` have the
    codes, or dense weights. macros: names and values. codes: number of codes that a lane reads at a time. tables:
    number of codebooks that a threadgroup reads. text: the kernel's file in metal/. libraries: files with the functions
    that it calls.
    """

    name: str
    bits: int
    arrays: tuple[str, ...]
    macros: tuple[tuple[str, object], ...]
    planes: int = 1
    codes: int = 16
    tables: object = 0
    text: str = "matvec"
    libraries: tuple[str, ...] = ("codes",)


@dataclass(frozen=True)
class Spec:
    """The properties that a kernel's source depends on.

    vectors: 0 for a kernel that decodes weights. dtype: of activations and result. ragged: whether the last step of a
    row has fewer columns. staged: elements of x in threadgroup memory. experts: whether each vector has its own matrix
    of several. Rows and columns are not included, because Metal's compiler would compile a kernel for each shape.
    """

    layout: WeightLayout
    vectors: int
    variant: Variant
    has_bias: bool
    dtype: mx.Dtype
    ragged: bool = False
    staged: int = 0
    experts: bool = False

    @property
    def name(self) -> str:
        """The kernel's unique name: MLX finds compiled kernels by name and types."""
        kind = f"{self.layout.name}_{TYPES[self.dtype]}_v{self.vectors}"
        variant = f"{self.variant.name}{self.variant.simd_groups}x{self.variant.rows}"
        flags = f"b{int(self.has_bias)}r{int(self.ragged)}s{self.staged}{'e' if self.experts else ''}"
        return f"gearbx_{kind}_{variant}_{flags}"

    @property
    def input_names(self) -> list[str]:
        first = ["x", *self.layout.arrays] if self.vectors else [*self.layout.arrays, "chosen"]
        return [*first, *(["bias"] if self.has_bias else []), *(["experts"] if self.experts else []), "sizes"]

    @property
    def header(self) -> str:
        """Definitions of UNROLL, the macros, and T, the type of activations and result; then the libraries.

        Template arguments could replace the macros, but MLX writes those again at each launch.
        """
        macros = {
            "UNROLL": UNROLL,
            "VECTORS": self.vectors,
            "ROWS": self.variant.rows,
            "SIMD_GROUPS": self.variant.simd_groups,
            "HAS_BIAS": int(self.has_bias),
            "EXPERTS": int(self.experts),
            "RAGGED": int(self.ragged),
            "STAGED": self.staged,
            "CODES": self.layout.codes,
            "PLANE_COUNT": self.layout.planes,
            "TABLES": self.layout.tables,
        } | {f"X_{name.upper()}": int(name == self.variant.name) for name in VARIANTS}
        defined = [f"#define {name} {value}\n" for name, value in (macros | dict(self.layout.macros)).items()]
        return "".join([*defined, f"using T = {TYPES[self.dtype]};\n", *map(source_text, self.layout.libraries)])


@functools.cache
def build(spec: Spec) -> Any:
    """Return MLX's callable for a kernel. MLX compiles it at the first launch."""
    return mx.fast.metal_kernel(
        name=spec.name,
        input_names=spec.input_names,
        output_names=["out"],
        source=without_comments(source_text(spec.layout.text)),
        header=without_comments(spec.header),
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch without its arrays, made once for activations of one shape and type, and called for each matmul.

    It keeps no array of a model, so that the weights of offloaded gears leave memory.

    Args:
        spec: the kernel. options: of MLX's call; `output_shapes` has the shape of the result.
        numbers: the last inputs, such as the sizes of the weight. They are arrays, because MLX would make arrays of
            numbers at each launch. As constants of the kernel, they would compile it for each shape of a model.
        few: indices of inputs to pad, with fewer than 8 elements.
    """

    spec: Spec
    options: dict[str, Any]
    numbers: tuple[mx.array, ...] = ()
    few: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.options["output_shapes"][0]

    @functools.cached_property
    def kernel(self) -> Any:
        """MLX's callable. Raises GearbxError if Metal is not available."""
        check_available()
        if 0 in self.shape:  # a kernel for it would have no threads
            return lambda **_: [mx.zeros(self.shape, *self.options["output_dtypes"])]
        return build(self.spec)

    def __call__(self, *inputs: Any) -> mx.array:
        """Return the result for inputs of the prepared shapes and types.

        The inputs of a matmul are x, the packed arrays and the output bias; its result has the activations' type.
        Inputs are not checked, because this runs for every matrix and token. Raises GearbxError without Metal.
        """
        complete = self.completed(inputs) if self.few else (*inputs, *self.numbers)
        return self.result(self.kernel(inputs=complete, **self.options)[0])

    def completed(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the kernel's inputs, padded if they have fewer than 8 elements. The kernel reads no padding."""
        complete = [*inputs, *self.numbers]
        for place in self.few:
            small = complete[place].reshape(-1)
            complete[place] = mx.pad(small, (0, MIN_ELEMENTS - small.size))
        return complete

    def result(self, out: mx.array) -> mx.array:
        """Return the kernel's output in the type of the result: decoded weights are written as their bits."""
        return out if self.spec.vectors else out.view(self.spec.dtype)


@dataclass(frozen=True, eq=False)
class Launch:
    """A prepared launch with its inputs. Callers that launch again keep `prepared`."""

    prepared: Prepared
    inputs: tuple[Any, ...]

    def run(self) -> mx.array:
        """Return the result; a matmul's has the activations' type. Raises GearbxError if Metal is not available."""
        return self.prepared(*self.inputs)

    def attempt(self) -> mx.array | None:
        """Return the result as `run` does; None if the kernel cannot run, so that MLX's operations compute.

        The first launch of each kernel is evaluated, to show whether Apple's compiler accepts its source.
        """
        spec = self.prepared.spec
        accepted = ACCEPTED.get(spec)
        if accepted is not None:
            return self.run() if accepted else None
        try:
            result = self.run()
            mx.eval(result)
        except ValueError:  # mx.compile evaluates no array, so that the compiler's answer is unknown
            return None
        except RuntimeError as error:
            disable(spec, error)
            return None
        ACCEPTED[spec] = True
        return result


ACCEPTED: dict[Spec, bool] = {}
"""Kernels that Apple's compiler accepted (True) or refused in this process."""


def disable(spec: Spec, error: Exception) -> None:
    """Disable a kernel for this process; warn once for its source file."""
    text = spec.layout.text
    warned = any(kernel.layout.text == text for kernel, accepted in ACCEPTED.items() if not accepted)
    ACCEPTED[spec] = False
    if not warned:
        message = f"metal/{text}.metal does not run here ({one_line(error)}): MLX's operations compute instead"
        warnings.warn(message, GearbxWarning, stacklevel=4)


def launch(spec: Spec, inputs: Sequence[mx.array], sizes: list[int], shape: tuple[int, ...], pairs: int = 1) -> Launch:
    """Return the launch of a kernel for all rows.

    Args:
        inputs: of the kernel, before the sizes. sizes: rows first, in the kernel's order. shape: of the result.
        pairs: of a vector and an expert.
    """
    threadgroup = LANES * spec.variant.simd_groups
    groups = math.ceil(sizes[0] / (spec.variant.simd_groups * spec.variant.rows))
    options = {
        "grid": (groups * threadgroup * pairs, 1, 1),
        "threadgroup": (threadgroup, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [spec.dtype if spec.vectors else mx.uint16],
    }
    few = tuple(place for place, each in enumerate(inputs) if each.size < MIN_ELEMENTS)
    return Launch(Prepared(spec, options, (mx.array(sizes, mx.int32),), few), tuple(inputs))


def check_arrays(*wanted: tuple[str, mx.array, mx.Dtype, tuple[int, ...]]) -> None:
    """Validate arrays by name, type and shape: with others, a kernel would read out of bounds. Raises GearbxError."""
    for name, array, dtype, shape in wanted:
        if (array.dtype, array.shape) != (dtype, shape):
            raise GearbxError(f"{name}: must be {shape} {dtype}, got {array.shape} {array.dtype}")


def takes(x: mx.array, columns: int) -> bool:
    """Return whether a kernel takes activations (..., columns): their number and their type."""
    return x.ndim > 0 and 0 < x.size <= MAX_VECTORS * columns and x.dtype in METAL_DTYPES
