"""What ends a service for a reason that its user can act on."""

from typing import ClassVar

from relax.launch.process import IN_VAIN


class ServiceError(Exception):
    """Ends the service; printed without a traceback."""

    code: ClassVar[int] = 1


class NotAdmitted(ServiceError):
    """The controller is not there, or takes no such service into the run."""

    code = IN_VAIN
