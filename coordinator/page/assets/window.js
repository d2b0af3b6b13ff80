const WINDOWS = [[60, "1 min"], [600, "10 min"], [3600, "1 h"]];
const ENDINGS = ["answered", "failed", "refused", "rejected", "left"];
const LONGEST_S = 3600;
let periods = []; // of the last hour; the newest is not over
let windowS = 600; // what everything on the page is about
let growth = 1.05; // of the buckets of latencies

function takePeriods(news, isFirst) {
  if (isFirst) periods = [];
  if (periods.at(-1)?.isCurrent) periods.pop();
  periods.push(...news.periods, { ...news.current, isCurrent: true });
  const end = news.current.ends_at;
  while (periods.length && periods[0].ends_at <= end - LONGEST_S) periods.shift();
  growth = news.growth;
}

function newestAt() {
  return periods.at(-1)?.ends_at ?? 0;
}

function isInWindow(at) {
  return at > newestAt() - windowS;
}

function inWindow() {
  return periods.filter((period) => isInWindow(period.ends_at));
}

function addInto(sums, counts) {
  for (const [key, count] of Object.entries(counts)) sums[key] = (sums[key] ?? 0) + count;
  return sums;
}

/** Several periods as one. */
function together(several) {
  const sum = (read) => several.reduce((total, period) => total + read(period), 0);
  const all = (read) => several.reduce((sums, period) => addInto(sums, read(period)), {});
  const promises = {};
  const tenants = {};
  for (const period of several) {
    for (const [name, one] of Object.entries(period.promises)) {
      promises[name] = addInto(promises[name] ?? {}, one);
    }
    for (const [name, one] of Object.entries(period.tenants)) {
      const before = tenants[name] ?? { endings: {}, prompt_tokens: 0, output_tokens: 0 };
      tenants[name] = {
        endings: addInto(before.endings, one.endings),
        prompt_tokens: before.prompt_tokens + one.prompt_tokens,
        output_tokens: before.output_tokens + one.output_tokens,
      };
    }
  }
  const seconds = sum((period) => period.seconds) || 1;
  return {
    seconds, promises, tenants,
    ends_at: several.at(-1)?.ends_at ?? 0,
    endings: all((period) => period.endings),
    errors: all((period) => period.errors),
    prompt_tokens: sum((period) => period.prompt_tokens),
    cached_tokens: sum((period) => period.cached_tokens),
    output_tokens: sum((period) => period.output_tokens),
    ttft: all((period) => period.ttft),
    tpot: all((period) => period.tpot),
    most_inflight: Math.max(0, ...several.map((period) => period.most_inflight)),
    mean_inflight: sum((period) => period.mean_inflight * period.seconds) / seconds,
    most_waiting: Math.max(0, ...several.map((period) => period.most_waiting)),
    kv_used: several.at(-1)?.kv_used ?? {},
  };
}

/** The window in about sixty pieces: what the charts are drawn from. */
function pieces() {
  const length = Math.max(5, windowS / 60);
  const groups = new Map();
  for (const period of inWindow()) {
    const key = Math.floor(period.ends_at / length);
    groups.set(key, [...(groups.get(key) ?? []), period]);
  }
  return [...groups.values()].map(together);
}

/** A quantile of buckets, in milliseconds; null: they are empty. */
function quantile(buckets, share) {
  const sorted = Object.entries(buckets).map(([b, count]) => [Number(b), count]).sort((a, b) => a[0] - b[0]);
  let left = share * sorted.reduce((sum, [, count]) => sum + count, 0);
  for (const [b, count] of sorted) {
    left -= count;
    if (left <= 0) return growth ** (b + 0.5);
  }
  return null;
}

function callsOf(endings) {
  return Object.values(endings).reduce((sum, count) => sum + count, 0);
}

/** "10 min", or how much of that there is. */
function spanText(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 3590 ? `${Math.round(seconds / 60)} min` : "1 h";
}
