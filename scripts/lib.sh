# What the scripts share. Sourced from the root of the clone, never run.

export PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin:/usr/sbin:/sbin"
export TORCHFS_TOOLS="${TORCHFS_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/torchfs/tools}"
TOOLS=$TORCHFS_TOOLS

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Mounting needs root. Everything else runs as who you are.
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -E "$@"; fi; }
