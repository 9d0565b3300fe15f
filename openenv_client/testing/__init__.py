"""What users test with: an OpenEnv server that plays a script, with faults."""

from .mock_server import Fault, MockEnvServer, Received, Script, echo, reply

__all__ = ["Fault", "MockEnvServer", "Received", "Script", "echo", "reply"]
