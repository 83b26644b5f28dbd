"use strict";
// A batch: what happened to it, and its groups.

const BatchView = ({ batch }) => {
  const left = Object.entries(batch.left);
  const flat = batch.groups.spread.filter((s) => s === 0).length;
  return html`<section><h1>Batch ${batch.batch} <small>${batch.trained_rows} of ${batch.rows} rows trained, ${batch.trained_tokens} of ${batch.tokens} tokens</small></h1>
    <dl>
      <dt>advantages</dt><dd>${batch.stages.join(" \u2192 ")}</dd>
      <dt>rewards</dt><dd>${Object.entries(batch.rewards).map(([n, v]) => `${n} ${number(v)}`).join(", ") || number(mean(batch.groups.reward))}</dd>
      <dt>without signal</dt><dd>${flat} of ${batch.groups.group.length} groups</dd>
      ${batch.selected_by ? html`<dt>prompts</dt><dd>chosen by ${batch.selected_by}</dd>` : ""}
      ${left.map(([who, [rows, tokens]]) => html`<dt>${who}</dt><dd>took ${counted(tokens, "token")} out of ${counted(rows, "row")}</dd>`)}
    </dl>
    <${Groups} groups=${groupsOf(batch)}/></section>`;
};
