#!/usr/bin/env bash
# Fetches the vendored scripts from the npm registry again: bash renew.sh. Change a version here and look at the page.
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fetch() { # package, version, file in it, file here, name of the licence
  (cd "$folder" && npm pack --silent "$1@$2" > /dev/null && rm -rf package && tar xzf "$1-$2.tgz")
  cp "$folder/package/$3" "$4"
  [ -z "${5:-}" ] || cp "$folder/package/LICENSE" "$5"
}
fetch htm 3.1.1 preact/standalone.umd.js htm-preact.js htm-LICENSE.txt # has preact in it
fetch preact 10.5.13 LICENSE preact-LICENSE.txt # the licence alone
fetch uplot 1.6.32 dist/uPlot.iife.min.js uplot.js uplot-LICENSE.txt
fetch uplot 1.6.32 dist/uPlot.min.css uplot.css
fetch diff 8.0.2 dist/diff.min.js diff.js diff-LICENSE.txt
