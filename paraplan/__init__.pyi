from paraplan.api import Plan as Plan
from paraplan.api import compile as compile
from paraplan.capture.register import register_cost as register_cost
from paraplan.capture.register import register_rule as register_rule
from paraplan.explaining import explain as explain
from paraplan.fitting import fit as fit
from paraplan.ir.errors import InfeasibleError as InfeasibleError
from paraplan.ir.errors import ParaplanError as ParaplanError
from paraplan.ir.machine.cluster import ClusterSpec as ClusterSpec
from paraplan.ir.process.memo import release_caches as release_caches
from paraplan.planner.constraints import Constraints as Constraints
from paraplan.runtime.trainer import Trainer as Trainer

__version__: str
