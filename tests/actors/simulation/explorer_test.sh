#!/bin/sh
# Runs two seeds of each simulation. Words that the explorer does not know are refused by name.
explorer=$1
for of in clusters links engines; do
  said=$("$explorer" --of "$of" --seeds 1..2) || { echo "$said"; exit 1; }
  [ "$(echo "$said" | tail -1)" = "2 passed, 0 failed" ] || { echo "$said"; exit 1; }
  said=$("$explorer" --of "$of" --trace 1) || { echo "$said"; exit 1; }
  [ -n "$said" ] || { echo "no story of $of"; exit 1; }
  said=$("$explorer" --of "$of" --shrink 1 2>&1) && { echo "$said"; exit 1; }
  [ "$said" = "seed 1 breaks no invariant" ] || { echo "$said"; exit 1; }
done
refuses() {
  wants=$1
  shift
  said=$("$explorer" "$@" 2>&1)
  code=$?
  echo "$said" | grep -q -- "$wants" || { echo "$*: $said"; exit 1; }
  [ $code = 2 ] || { echo "$*: ends with $code"; exit 1; }
}
refuses "nodes not in {clusters,links,engines}" --of nodes --seeds 1
refuses "only clusters can be large" --of links --large --seeds 1
refuses "anything" --of links --seeds 1 anything
refuses "which ends before it begins" --seeds 2..1
refuses "is required" --of links
