"""The job file: one YAML file that describes a whole job and is checked before anything starts.

Order of precedence: defaults < file < `--set key=value`. The file never contains credentials: they are in environment
variables (`DOLL_KAFKA_USERNAME`, `DOLL_KAFKA_PASSWORD`, `DOLL_REDIS_PASSWORD`). The code that opens a connection reads
these variables.

The module `job` defines the whole file. `training`, `tables`, `policy`, `data`, `format`, `source`, `roles`,
`connections`, `pipeline`, `provision` and `fleets` define its sections, which are subclasses of `section.Section`.
`variants` selects a class by the value of a key. `loader` reads a file and formats its errors.
`deploy/config_reference.py` makes docs/configuration.md from these classes.
"""

from doll.config.fleets import ComposeFleetConfig as ComposeFleetConfig
from doll.config.fleets import Ec2FleetConfig as Ec2FleetConfig
from doll.config.fleets import KubernetesFleetConfig as KubernetesFleetConfig
from doll.config.fleets import LambdaFleetConfig as LambdaFleetConfig
from doll.config.fleets import PodPlacement as PodPlacement
from doll.config.fleets import ProcessesFleetConfig as ProcessesFleetConfig
from doll.config.fleets import RayFleetConfig as RayFleetConfig
from doll.config.job import JobConfig as JobConfig
from doll.config.loader import dump as dump
from doll.config.loader import dump_run as dump_run
from doll.config.loader import load as load
from doll.config.loader import located as located
from doll.config.loader import parse as parse
from doll.config.provision import PlanConfig as PlanConfig
from doll.config.source import ArrivalsConfig as ArrivalsConfig
from doll.config.source import FeedSource as FeedSource
from doll.config.source import HistorySource as HistorySource
from doll.config.source import StdinSource as StdinSource
from doll.config.tables import TableConfig as TableConfig
from doll.config.training import AdagradConfig as AdagradConfig
from doll.config.training import AdamConfig as AdamConfig
from doll.config.training import EmaConfig as EmaConfig
from doll.config.training import OptimizerConfig as OptimizerConfig
from doll.config.training import SchedulePart as SchedulePart
from doll.config.training import SgdConfig as SgdConfig
from doll.config.training import StopConfig as StopConfig
from doll.config.training import TorchConfig as TorchConfig
from doll.config.training import TrainingConfig as TrainingConfig
