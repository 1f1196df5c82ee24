"""The version, where both the package's face and what must not import it can read it."""

__version__ = "0.1.0"
