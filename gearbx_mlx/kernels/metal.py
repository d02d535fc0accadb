"""Metal kernels through `mx.fast.metal_kernel`: their texts, whether they can run, their variants, and their launches.

A kernel is made of a text of metal/ and the macros that specialize it. A launch is prepared once for inputs of some
shapes, and is called for each product after that, because preparing takes longer than a call. Nothing is built at
import, and only a call needs a Mac: a launch can be examined anywhere.
"""

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..errors import GearbxError, GearbxWarning, one_line

TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float"}  # MLX's names for them in a text
UNROLL = '_Pragma("clang loop unroll(full)")'  # arrays that a lane indexes in a loop stay in registers only then
UNREAD = re.compile(r"[ \t]*//[^\n]*|[ \t]+(?=\\\n)")  # comments, and spaces before the end of a macro's line


def source_text(name: str) -> str:
    """Return the text of metal/<name>.metal."""
    file = metal_folder() / f"{name}.metal"
    if not file.is_file():
        raise GearbxError(f"metal/{name}.metal is missing from this installation; install gearbx-mlx again")
    return file.read_text(encoding="utf-8")


def metal_folder() -> Path:
    """Return the folder of the kernels' texts: in the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next((each for each in (package / "metal", package.parent / "metal") if each.is_dir()), package / "metal")


def without_comments(text: str) -> str:
    """Return the same program in fewer bytes: MLX copies and hashes the text of a kernel at each launch."""
    return "\n".join(line for line in UNREAD.sub("", text).splitlines() if line.strip()) + "\n"


def definitions(macros: Mapping[str, object], dtype: mx.Dtype) -> str:
    """Return the lines that define UNROLL, macros with these names and values, and T, the type of activations and
    result.

    Template arguments could say the same, but MLX writes those again at each launch.
    """
    defined = "".join(f"#define {name} {value}\n" for name, value in ({"UNROLL": UNROLL} | dict(macros)).items())
    return f"{defined}using T = {TYPES[dtype]};\n"


class MetalKernel(Protocol):
    """What `metal.build` needs of a kernel.

    name: unique, because MLX finds compiled kernels by name and types. text: its file in metal/. read_once: buffers of
    which a launch reads no byte twice.
    """

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def input_names(self) -> Sequence[str]: ...
    @property
    def header(self) -> str: ...
    @property
    def read_once(self) -> Sequence[str]: ...
    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class TextKernel:
    """A kernel made of one text of metal/, its T and the macros that specialize it; other fields as in `MetalKernel`.

    libraries: further texts of metal/, with functions that the first one calls.
    """

    text: str
    dtype: mx.Dtype
    input_names: tuple[str, ...]
    macros: tuple[tuple[str, int], ...]
    read_once: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "_".join(["gearbx", self.text, TYPES[self.dtype], *(str(value) for _, value in self.macros)])

    @property
    def header(self) -> str:
        return definitions(dict(self.macros), self.dtype) + "".join(map(source_text, self.libraries))


@dataclass(frozen=True)
class PackedLayout:
    """How a matrix is packed, as buffers and macros of metal/matvec.metal.

    name: unique. bits: of a code, all planes together. arrays: names of the buffers. macros: names and values.
    codes: that a lane reads at a time. tables: how many codebooks a threadgroup reads, if any.
    """

    name: str
    bits: int
    arrays: tuple[str, ...]
    macros: tuple[tuple[str, object], ...]
    codes: int = 16
    tables: object = 0


LANES = 32  # of a SIMD group
MAX_VECTORS = 16
METAL_DTYPES = tuple(TYPES)

# GEARBX 8.1: the largest activations that are staged in threadgroup memory.
STAGED_COLUMNS = 6144
STAGED_BYTES = 24 * 1024

# MLX passes smaller arrays in another address space ("constant"), from which the kernels do not read.
MIN_ELEMENTS = 8


def available() -> bool:
    """Return whether `Launch.run` can run on MLX's default device."""
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def check_available() -> None:
    """Raises GearbxError where Metal kernels cannot run, with the reason in one line."""
    if available():
        return
    if mx.metal.is_available():
        raise GearbxError("Metal kernels run on the GPU, and MLX's default device is the CPU")
    raise GearbxError("Metal kernels need a Mac with Apple silicon: this MLX has no Metal device")


@dataclass(frozen=True)
class Variant:
    """How activations reach the lanes, and which rows a SIMD group computes.

    name: the memory that lanes read activations from: `registers`, `threadgroup` or `device`.
    simd_groups: per threadgroup. rows: per SIMD group.
    """

    name: str
    simd_groups: int
    rows: int


VARIANTS = ("registers", "threadgroup", "device")


def variant_named(name: str, bits: int, vectors: int) -> Variant:
    """Return the variant with this name. Raises GearbxError if there is none.

    `registers` follows MLX's qmv_fast and llama.cpp: 2 SIMD groups of 4 rows, whose activations stay in registers; of 2
    rows where three vectors or more fill the registers. The other two follow GEARBX 8.1 and 8.2: 8 SIMD groups of 2
    rows, or of 1 row for 2 bits, where unpacking takes most of the time.
    """
    if name == "registers":
        return Variant(name, 2, 4 if vectors <= 2 else 2)
    if name in VARIANTS:
        return Variant(name, 8, 1 if bits <= 2 else 2)
    raise GearbxError(f"kernel variant {name!r} is none of {', '.join(VARIANTS)}")


def expected_variant(vectors: int) -> str:
    """Return the variant that should be the fastest; that is not measured.

    The two fastest published kernels are like `registers`, and more than 8 vectors do not fit there.
    """
    return "registers" if vectors <= 8 else "device"


def fits_threadgroup(columns: int, vectors: int, dtype: mx.Dtype) -> bool:
    """Return whether the `threadgroup` variant can stage this number of vectors, columns and bytes."""
    return columns <= STAGED_COLUMNS and columns * vectors * dtype.size <= STAGED_BYTES


def fitting_variants(names: Sequence[str], columns: int, vectors: int, dtype: mx.Dtype) -> list[str]:
    """Return those of the variants that take activations of this size."""
    fits = fits_threadgroup(columns, vectors, dtype)
    return [name for name in names if name != "threadgroup" or fits]


def choose_variant(bits: int, columns: int, vectors: int, dtype: mx.Dtype, name: str | None = None) -> Variant:
    """Return the variant with this name, or the expected one. A result has the same bits in every variant.

    Raises:
        GearbxError: there is no such variant, or the activations are too large for `threadgroup`.
    """
    chosen = variant_named(name or expected_variant(vectors), bits, vectors)
    if chosen.name == "threadgroup" and not fits_threadgroup(columns, vectors, dtype):
        raise GearbxError(
            f"{vectors} x {columns} activations of {dtype.size} bytes do not fit threadgroup memory "
            f"({STAGED_COLUMNS} columns, {STAGED_BYTES} bytes); use 'registers' or 'device'"
        )
    return chosen


@functools.cache
def build(spec: MetalKernel) -> Any:
    """Make MLX's callable for a kernel. MLX compiles it at its first launch."""
    return mx.fast.metal_kernel(
        name=spec.name,
        input_names=list(spec.input_names),
        output_names=["out"],
        source=without_comments(source_text(spec.text)),
        header=without_comments(spec.header),
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch without its arrays: made once for activations of one shape and type, then called for each product.

    It keeps no array of a model, so that the weights of a gear that is offloaded leave memory.

    Args:
        spec: the kernel. options: of MLX's call, where `output_shapes` is the shape of the result.
        numbers: the last inputs, such as the sizes of the weight. They are arrays because MLX would make one of a
            number at each launch, and no constants of the kernel, which would be compiled for each shape of a model.
        few: which inputs have fewer than 8 elements, and are padded.
        view: the type of the result, if the kernel writes its bits as whole numbers.
    """

    spec: MetalKernel
    options: dict[str, Any]
    numbers: tuple[mx.array, ...] = ()
    few: tuple[int, ...] = ()
    view: mx.Dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.options["output_shapes"][0]

    @functools.cached_property
    def kernel(self) -> Any:
        """What makes the result. Raises GearbxError where Metal is not available."""
        check_available()
        return nothing if 0 in self.shape else build(self.spec)

    def __call__(self, *inputs: Any) -> mx.array:
        """Return the result, for the `inputs` of the launch that this was prepared for, or others of their shapes and
        types.

        A product's are x, the packed arrays and the output bias, and its result has the activations' type. Nothing is
        checked: this is called for every matrix and token. Raises GearbxError where Metal is not available.
        """
        complete = self.completed(inputs) if self.few else (*inputs, *self.numbers)
        out = self.kernel(inputs=complete, **self.options)[0]
        return self.result(out)

    def completed(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs as the kernel takes them. Those with fewer than 8 elements are padded, and it reads no
        padding."""
        complete = [*inputs, *self.numbers]
        for place in self.few:
            small = complete[place].reshape(-1)
            complete[place] = mx.pad(small, (0, MIN_ELEMENTS - small.size))
        return complete

    def result(self, out: mx.array) -> mx.array:
        """Return what the kernel wrote, in the type of the result."""
        return out if self.view is None else out.view(self.view)


def nothing(output_shapes: Sequence[tuple[int, ...]], output_dtypes: Sequence[mx.Dtype], **_: Any) -> list[mx.array]:
    """Return a result without elements, for which a kernel would have no threads."""
    return [mx.zeros(output_shapes[0], output_dtypes[0])]


@dataclass(frozen=True, eq=False)
class Launch:
    """A prepared launch and its inputs, which fit it. Callers that launch again keep `prepared`."""

    prepared: Prepared
    inputs: tuple[Any, ...]

    @property
    def spec(self) -> MetalKernel:
        return self.prepared.spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.prepared.shape

    def run(self) -> mx.array:
        """Compute the result; a product has the activations' type. Raises GearbxError where Metal is not available."""
        return self.prepared(*self.inputs)

    def attempt(self) -> mx.array | None:
        """Like `run`; None where the kernel cannot run, so that MLX's operations compute.

        The first launch of each kernel is evaluated, which shows whether Apple's compiler takes its text.

        Raises:
            GearbxError: Metal is not available.
        """
        taken = TAKEN.get(self.spec)
        if taken is not None:
            return self.run() if taken else None
        try:
            result = self.run()
            mx.eval(result)
        except GearbxError:
            raise
        except ValueError:  # inside of mx.compile nothing can be evaluated, so that nothing shows
            return None
        except RuntimeError as error:
            do_without(self.spec, error)
            return None
        TAKEN[self.spec] = True
        return result


TAKEN: dict[MetalKernel, bool] = {}
"""Whether Apple's compiler took a kernel in this process."""


def do_without(spec: MetalKernel, error: Exception) -> None:
    """Do without a kernel from now on; say so once for its text."""
    told = any(kernel.text == spec.text for kernel, taken in TAKEN.items() if not taken)
    TAKEN[spec] = False
    if not told:
        said = f"metal/{spec.text}.metal does not run here ({one_line(error)}): MLX's operations compute in its place"
        warnings.warn(said, GearbxWarning, stacklevel=4)


def options(threads: int, threadgroup: int, shape: tuple[int, ...], dtype: mx.Dtype) -> dict[str, Any]:
    """Options of a call with this number of threads, in all and of a threadgroup, and this result."""
    return {
        "grid": (threads, 1, 1),
        "threadgroup": (threadgroup, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
    }


def places_of_few(inputs: Sequence[mx.array]) -> tuple[int, ...]:
    """Return which of the inputs have fewer than 8 elements."""
    return tuple(place for place, each in enumerate(inputs) if each.size < MIN_ELEMENTS)


def takes(x: mx.array, columns: int) -> bool:
    """Return whether a kernel takes activations (..., columns): their number and their type."""
    return x.ndim > 0 and 0 < x.size <= MAX_VECTORS * columns and x.dtype in METAL_DTYPES
