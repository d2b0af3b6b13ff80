"""pdserve: a disaggregated prefill/decode LLM serving cluster."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pdserve")
except PackageNotFoundError:  # a source tree on sys.path without `make env`
    __version__ = "0+uninstalled"
