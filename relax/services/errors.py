"""What ends a service for a reason that its user can act on."""


class ServiceError(Exception):
    """Ends the service; printed without a traceback."""
