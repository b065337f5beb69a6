#!/usr/bin/env bash
# Find Chromium for the browser tests.  Only in CI, and as root, is it installed; elsewhere this says how.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    exit 0
  fi
done
if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
  exit 0
fi
echo "note: Chromium was not found; the browser tests will be skipped."
echo "      To run them:  sudo apt-get install chromium   (or put a chromium on the PATH)"
