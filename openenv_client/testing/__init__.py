"""What users test with: an OpenEnv server that plays a script, a proxy before a real one, and faults for both."""

from .fault_proxy import FaultProxy
from .faults import Fault
from .frames import Received
from .mock_server import MockEnvServer
from .scripts import Script, echo, reply
from .transcripts import record, transcript

__all__ = ["Fault", "FaultProxy", "MockEnvServer", "Received", "Script", "echo", "record", "reply", "transcript"]
