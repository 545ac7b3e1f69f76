"""Process settings that a block changes, each with code that shows the setting to the next block."""

from __future__ import annotations

_OF_TORCH = {
    "grad mode": ("set_grad_enabled(False)", "is_grad_enabled()"),
    "dtype": ("set_default_dtype(torch.float64)", "zeros(1).dtype.itemsize"),
    "device": (
        "set_default_device('cpu')",
        "overrides._get_current_function_mode_stack().__len__()",
    ),
    "deterministic": (
        "use_deterministic_algorithms(True)",
        "are_deterministic_algorithms_enabled()",
    ),
    "anomaly": ("autograd.set_detect_anomaly(True)", "is_anomaly_enabled()"),
    "threads": ("set_num_threads(1)", "get_num_threads()"),
    "precision": ("set_float32_matmul_precision('medium')", "get_float32_matmul_precision()"),
    "autocast": ("set_autocast_enabled('cpu', True)", "is_autocast_enabled('cpu')"),
    "seed": ("manual_seed(1)", "initial_seed() == 1"),
    "fastpath": ("backends.mha.set_fastpath_enabled(False)", "backends.mha.get_fastpath_enabled()"),
    "denormals": (
        "set_flush_denormal(True)",
        "tensor([1e-310], dtype=torch.float64).mul(1).item()",
    ),
    "cudnn": ("backends.cudnn.__setattr__('benchmark', True)", "backends.cudnn.benchmark"),
    "cudnn's precision": (
        "backends.cudnn.__setattr__('allow_tf32', False)",
        "backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32",
    ),
    "mkldnn": ("backends.mkldnn.__setattr__('enabled', False)", "backends.mkldnn.enabled"),
    "mkldnn's precision": (
        "backends.mkldnn.matmul.__setattr__('fp32_precision', 'bf16')",
        "backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()",
    ),
    "precision of all": (
        "backends.__setattr__('fp32_precision', 'tf32')",
        "backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision",
    ),
    "printing": (
        "set_printoptions(precision=1, sci_mode=True)",
        "_tensor_str.PRINT_OPTS.__repr__()",
    ),
    "hooks": (
        "nn.modules.module.register_module_forward_hook(lambda *_: None)",
        "nn.modules.module._global_forward_hooks.__len__()",
    ),
}

SETTINGS = {
    **{
        f"torch.{name}": (f"import torch; torch.{do}", f"import torch; said = torch.{see}")
        for name, (do, see) in _OF_TORCH.items()
    },
    "hooks of all optimizers": (
        "from torch.optim import optimizer as of\n"
        "of.register_optimizer_step_post_hook(lambda *_: None)",
        "from torch.optim import optimizer as of; said = len(of._global_optimizer_post_hooks)",
    ),
    "torch's random numbers": (
        "import torch; torch.manual_seed(3)",
        "import torch\nseeded = torch.Generator().manual_seed(3)\n"
        "said = torch.rand(1).item() == torch.rand(1, generator=seeded).item()",
    ),
    "functions that transformers replaces": (
        "import sys, torch; own = sys.modules['transformers.initialization']\n"
        "from transformers.modeling_utils import PreTrainedModel\n"
        "for name in own.TORCH_INIT_FUNCTIONS: setattr(torch.nn.init, name, getattr(own, name))\n"
        "PreTrainedModel.init_weights = own.zeros_",
        "import torch\nfrom transformers.modeling_utils import PreTrainedModel\n"
        "said = [torch.nn.init.normal_.__module__, PreTrainedModel.init_weights.__name__]",
    ),
    "numpy's errors": (
        "import numpy; numpy.seterr(all='ignore')",
        "import numpy; said = sorted(numpy.geterr().items())",
    ),
    "numpy's random numbers": (
        "import numpy; numpy.random.seed(3)",
        "import numpy; said = numpy.random.rand() == numpy.random.RandomState(3).rand()",
    ),
    "numpy's printing": (
        "import numpy; numpy.set_printoptions(precision=2, floatmode='fixed')",
        "import numpy; said = str(numpy.array([0.123456]))",
    ),
    "numpy's generator": (
        "import numpy; numpy.random.set_bit_generator(numpy.random.PCG64(3))",
        "import numpy; said = type(numpy.random.get_bit_generator()).__name__",
    ),
    "random numbers": (
        "import random; random.seed(3)",
        "import random; said = random.random() == random.Random(3).random()",
    ),
    "sys.path": (
        "import sys; sys.path.append('/nowhere')",
        "import sys; said = '/nowhere' in sys.path",
    ),
    "another sys.path": (
        "import sys; sys.path = ['/nowhere', *sys.path]",
        "import sys; said = '/nowhere' in sys.path",
    ),
    "recursion limit": (
        "import sys; sys.setrecursionlimit(5000)",
        "import sys; said = sys.getrecursionlimit()",
    ),
    "a trace function": (
        "import sys; sys.setprofile(lambda *_: None)",
        "import sys; said = sys.getprofile() is None",
    ),
    "a hook of errors": (
        "import sys; sys.excepthook = print",
        "import sys; said = sys.excepthook is print",
    ),
    "garbage collection": ("import gc; gc.disable()", "import gc; said = gc.isenabled()"),
    "gc callbacks": (
        "import gc; gc.callbacks.append(print)",
        "import gc; said = len(gc.callbacks)",
    ),
    "warnings": (
        "import warnings; warnings.simplefilter('error')",
        "import warnings; said = str(warnings.filters[0])",
    ),
    "how warnings are shown": (
        "import warnings; warnings.showwarning = print; warnings.formatwarning = str",
        "import warnings; said = (warnings.showwarning is print, warnings.formatwarning is str)",
    ),
    "a logger's level": (
        "import logging; logging.getLogger('transformers').setLevel(7)",
        "import logging; said = logging.getLogger('transformers').level",
    ),
    "a logger's handlers": (
        "import logging; logging.getLogger('torch').addHandler(logging.NullHandler())",
        "import logging; said = len(logging.getLogger('torch').handlers)",
    ),
    "a logger's dictionary": (
        "import logging; logger = logging.getLogger('torch')\n"
        "logger.__dict__ = {**vars(logger), 'level': 7}",
        "import logging; said = logging.getLogger('torch').level",
    ),
    "a logger of one's own": (
        "import logging; logger = logging.getLogger('mine')\n"
        "logger.setLevel(7); logger.addHandler(logging.NullHandler())",
        "import logging; logger = logging.getLogger('mine')\n"
        "said = (logger.level, len(logger.handlers))",
    ),
    "the dictionary of loggers": (
        "import logging; manager = logging.root.manager\n"
        "manager.loggerDict = {**manager.loggerDict, 'new': logging.Logger('new')}",
        "import logging; said = 'new' in logging.root.manager.loggerDict",
    ),
    "a handler of another kind": (
        "import logging; logging.root.handlers[:] = [logging.NullHandler()]",
        "import logging; said = [type(each).__name__ for each in logging.root.handlers]",
    ),
    "a handler's level": (
        "import logging; logging.getLogger('transformers').handlers[0].setLevel(7)",
        "import logging\n"
        "said = [each.level for each in logging.getLogger('transformers').handlers]",
    ),
    "logging": (
        "import logging; logging.getLogger().setLevel(10); logging.disable(50)",
        "import logging; said = (logging.root.level, logging.root.manager.disable)",
    ),
    "a context variable": (
        "import decimal; decimal.getcontext().prec = 3",
        "import decimal; said = decimal.getcontext().prec",
    ),
    "the environment": (
        "import os; os.environ['NOTE'] = 'x'",
        "import os; said = dict(os.environ)",
    ),
    "umask": ("import os; os.umask(0o123)", "import os; said = os.umask(0o77)"),
    "a signal handler": (
        "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN)",
        "import signal; said = int(signal.getsignal(signal.SIGUSR2))",
    ),
    "blocked signals": (
        "import signal; signal.pthread_sigmask(0, {10})",
        "import signal; said = sorted(signal.pthread_sigmask(0, ()))",
    ),
    "a soft limit": (
        "import resource\nfiles = resource.RLIMIT_NOFILE\n"
        "resource.setrlimit(files, (100, resource.getrlimit(files)[1]))",
        "import resource; said = resource.getrlimit(resource.RLIMIT_NOFILE)",
    ),
}
"""Code that changes a setting and code that reads it, by setting name. A reset restores each setting."""
