// Figures and names as people read them.

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(count) < 1024 || unit === "TiB") return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
}

export function seconds(count) {
  if (count === null || count === undefined) return "";
  if (count < 90) return `${count < 9.95 ? count.toFixed(1) : Math.round(count)} s`;
  return count < 5400 ? `${Math.round(count / 60)} min` : `${(count / 3600).toFixed(1)} h`;
}

export const short = (digest) => digest.replace("sha256:", "").slice(0, 12);

export const clock = (epoch_s) => new Date(epoch_s * 1000).toTimeString().slice(0, 8);

// A package by its reference, its digest cut to 12 digits.
export const brief = (reference) => reference.replace(/@sha256:([0-9a-f]{12})[0-9a-f]*/, "@$1");

export const several = (count, one, many) => (count === 1 ? one : `${count} ${many}`);
