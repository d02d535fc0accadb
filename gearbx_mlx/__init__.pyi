from .analyze import analyze as analyze
from .calibrate import calibrate as calibrate
from .convert import convert as convert
from .decoding.governor import Governor as Governor
from .decoding.kickdown import GearedModel as GearedModel
from .decoding.kickdown import Kickdown as Kickdown
from .decoding.lossless import Lossless as Lossless
from .decoding.lossless_model import LosslessModel as LosslessModel
from .decoding.pair import Pair as Pair
from .decoding.pair import PairedModel as PairedModel
from .decoding.response import GearResponse as GearResponse
from .decoding.route import Route as Route
from .decoding.route import Static as Static
from .decoding.route import TelemetryOnly as TelemetryOnly
from .decoding.sampling import entropy_bits as entropy_bits
from .decoding.stream import batch_generate as batch_generate
from .decoding.stream import batch_generator as batch_generator
from .decoding.stream import stream_generate as stream_generate
from .decoding.wrapper import TextModel as TextModel
from .errors import GearbxError as GearbxError
from .errors import GearbxWarning as GearbxWarning
from .evaluate import evaluate as evaluate
from .gears.gearbox import Gearbox as Gearbox
from .gears.gearbox import Observer as Observer
from .gears.ladder import Gear as Gear
from .gears.ladder import Ladder as Ladder
from .generate import generate as generate
from .kernels.device import use_device as use_device
from .loading import load as load
from .loading import load_small as load_small
from .routing.gates import Monitor as Monitor
from .routing.gates import ThresholdGate as ThresholdGate

__version__: str

def _end_at_once(number: int, frame: object) -> None: ...
