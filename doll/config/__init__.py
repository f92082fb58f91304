"""The job file: one YAML file that describes a whole job and is checked before anything starts.

Order of precedence: defaults < file < `--set key=value`. Credentials are never in the file: they come from the
environment (`DOLL_KAFKA_USERNAME`, `DOLL_KAFKA_PASSWORD`, `DOLL_REDIS_PASSWORD`) and are read where a connection is
made.

`job` has the whole file; `training`, `policy`, `data`, `source`, `roles`, `services`, `provision` and `fleets` have its
sections, of `section.Section`. `variants` chooses among classes by a key, `plugins` loads extensions. `loader` reads a
file, `explain` words its errors, `reference` generates docs/configuration.md.
"""

from doll.config.data import DataConfig as DataConfig
from doll.config.fleets import ComposeFleetConfig as ComposeFleetConfig
from doll.config.fleets import Ec2FleetConfig as Ec2FleetConfig
from doll.config.fleets import FleetConfig as FleetConfig
from doll.config.fleets import ProcessesFleetConfig as ProcessesFleetConfig
from doll.config.job import JobConfig as JobConfig
from doll.config.loader import dump as dump
from doll.config.loader import load as load
from doll.config.loader import parse as parse
from doll.config.policy import PolicyConfig as PolicyConfig
from doll.config.provision import PlanConfig as PlanConfig
from doll.config.provision import ProvisionConfig as ProvisionConfig
from doll.config.source import ArrivalsConfig as ArrivalsConfig
from doll.config.source import CriteoSource as CriteoSource
from doll.config.source import CsvSource as CsvSource
from doll.config.source import DigitsSource as DigitsSource
from doll.config.source import IdxSource as IdxSource
from doll.config.source import JsonlSource as JsonlSource
from doll.config.source import RatingsSource as RatingsSource
from doll.config.source import SourceConfig as SourceConfig
from doll.config.source import StdinSource as StdinSource
from doll.config.source import SyntheticClicksSource as SyntheticClicksSource
from doll.config.source import SyntheticRatingsSource as SyntheticRatingsSource
from doll.config.source import SyntheticSource as SyntheticSource
from doll.config.source import TextSource as TextSource
from doll.config.training import AdagradConfig as AdagradConfig
from doll.config.training import AdamConfig as AdamConfig
from doll.config.training import OptimizerConfig as OptimizerConfig
from doll.config.training import SgdConfig as SgdConfig
from doll.config.training import StopConfig as StopConfig
from doll.config.training import TrainingConfig as TrainingConfig
