#!/usr/bin/env bash
# See tools/device_check.sh.
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/device_check.sh" tpu "$@"
