"""Tables of attribute names that start with an underscore, and of names that are never available."""

from __future__ import annotations

from typing import Any

Variables = dict[str, Any]
"""Values of a user's code, by name: globals, a class's attributes, or a pattern's captures."""


def words(text: str) -> frozenset[str]:
    """Return the whitespace-separated names in a text."""
    return frozenset(text.split())


_OPERATORS = words("add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or")

ALLOWED = frozenset(f"__{way}{name}__" for name in _OPERATORS for way in ("", "r", "i")) | words("""
    __neg__ __pos__ __abs__ __invert__ __complex__ __int__ __float__ __index__ __round__ __trunc__
    __floor__ __ceil__ __lt__ __le__ __eq__ __ne__ __gt__ __ge__ __hash__ __bool__
    __len__ __length_hint__ __getitem__ __setitem__ __delitem__ __missing__ __iter__ __next__
    __reversed__ __contains__ __enter__ __exit__ __aenter__ __aexit__ __await__ __aiter__ __anext__
    __call__ __init__ __new__ __post_init__ __init_subclass__ __class_getitem__ __set_name__
    __prepare__ __instancecheck__ __subclasscheck__ __subclasshook__
    __repr__ __str__ __bytes__ __format__ __dir__ __sizeof__ __copy__ __deepcopy__ __fspath__
    __match_args__ __slots__ __members__ __version__ __name__ __qualname__ __doc__ __module__
    __cause__ __context__ __suppress_context__ __notes__
    __origin__ __args__ __parameters__ __metadata__ __bound__ __constraints__ __debug__ __all__
""")
"""Dunders that a block may read from every object."""

OWN_OF_CLASS = words("__class__ __dict__ __weakref__ __abstractmethods__ __isabstractmethod__")
"""Names of `OWN` that a block may read from a user's class even if the class inherits them."""

OWN = OWN_OF_CLASS | words("""
    __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__ __get__ __set__ __delete__ __del__
    __wrapped__
""")
"""Dunders that a block may read only from objects of the user's own classes."""

BLOCKED = words("""
    __class__ __bases__ __base__ __mro__ __subclasses__ __globals__ __code__ __closure__ __dict__
    __builtins__ __func__ __self__ __traceback__ __reduce__ __reduce_ex__ __getattribute__
    __loader__ __spec__ __import__ __annotations__ __defaults__ __kwdefaults__
""")
"""Names that lead out of a block, and are refused without advice (except `__class__`)."""

CHECKED = words("__getattr__ __getattribute__ __setattr__ __delattr__")
"""Dunders that a block gets as functions that check their name argument."""

PUBLIC = words("""
    _asdict _replace _fields _make _field_defaults
    _name_ _value_ _missing_ _generate_next_value_ _ignore_ _order_ _sunder_
    _unpickle
""")
"""Public names of namedtuple and enum that start with an underscore to avoid clashes with fields.

`_unpickle` makes a time zone of `zoneinfo` from its name.
"""

INHERITED = words("mro")
"""Methods of every class that lead to other classes."""

WRITABLE = words("__doc__ __name__ __qualname__ __module__ __signature__")
"""Dunders that a block may assign on functions of the user's own."""

CONTEXTUAL = words("__cause__ __context__ __suppress_context__ __notes__")
"""Dunders that a block may assign on exceptions."""

# From __array_interface__ on: with any of these, numpy and torch treat any address as an array.
UNBOUND = words("""
    __builtins__ __import__ __build_class__ __loader__ __spec__
    __annotations__ __dataclass_fields__ __dataclass_params__ __reduce__ __reduce_ex__
    __array_interface__ __array_struct__ __cuda_array_interface__ __dlpack__
""")
"""Names that a user's code may not bind, in a class or elsewhere."""

FORMAT_METHODS = words("format format_map")
"""Methods of `str` that look up attributes named in the string."""

FOREIGN = words("""
    _cffi_backend _ctypes _frozen_importlib _frozen_importlib_external _imp _io _pickle _posixsubprocess
    _signal _sitebuiltins _socket _ssl asyncio cffi code codeop ctypes fcntl ftplib gc http importlib
    inspect io linecache marshal mmap multiprocessing nt os pathlib pickle pkgutil posix pty resource
    runpy select shelve shutil signal site smtplib socket socketserver sqlite3 ssl subprocess sys
    tempfile tokenize urllib zipfile zipimport
""")
"""Top-level modules whose functions, classes and objects a block may not use."""

DESCRIBING = words("__name__ __qualname__ __module__ __doc__")
"""Attributes that describe an object, and lead to no other."""
