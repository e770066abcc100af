"""Where logs and blobs live: one backend per file, chosen by URL scheme.

Importing this package imports no backend; `open_transport` imports the one that the URL names.
"""

from .options import Option
from .registry import Address, Backend, known_schemes, open_transport

__all__ = ["Address", "Backend", "Option", "known_schemes", "open_transport"]
