// What tells series apart: a colour that colour-blind people can tell from the others, and a pattern.

/** Colours in style.css: `--series-0` to `--series-5`. */
const COLOURS = 6;
/** Side of a tile of a pattern (CSS px). */
const TILE = 8;

/** Numbers of series by their names: a series keeps its colour and pattern while the page is open. */
export class SeriesNumbers {
  private readonly numbers = new Map<string, number>();

  of(key: string): number {
    const known = this.numbers.get(key);
    if (known !== undefined) return known;
    this.numbers.set(key, this.numbers.size);
    return this.numbers.size - 1;
  }
}

export function cssColour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function seriesColour(number: number): string {
  return cssColour(`--series-${number % COLOURS}`);
}

/** The area of a series. With more series than colours, colours repeat with other patterns. */
export function areaFill(number: number, pixelRatio: number): CanvasPattern | string {
  const colour = seriesColour(number);
  const tile = document.createElement("canvas");
  const side = Math.round(TILE * pixelRatio);
  tile.width = side;
  tile.height = side;
  const context = tile.getContext("2d");
  if (!context) return colour;
  context.scale(side / TILE, side / TILE);
  context.globalAlpha = 0.32;
  context.fillStyle = colour;
  context.fillRect(0, 0, TILE, TILE);
  context.globalAlpha = 0.75;
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  drawPattern(context, (number + Math.floor(number / COLOURS)) % COLOURS);
  return context.createPattern(tile, "repeat") ?? colour;
}

function drawPattern(context: CanvasRenderingContext2D, kind: number): void {
  const lines: Record<number, [number, number, number, number][]> = {
    1: [
      [-2, 2, 2, -2],
      [-2, 10, 10, -2],
      [6, 10, 10, 6],
    ],
    3: [
      [-2, 6, 2, 10],
      [-2, -2, 10, 10],
      [6, -2, 10, 2],
    ],
    4: [[0, 4, 8, 4]],
    5: [
      [4, 0, 4, 8],
      [0, 4, 8, 4],
    ],
  };
  context.beginPath();
  for (const [x, y, toX, toY] of lines[kind] ?? []) {
    context.moveTo(x, y);
    context.lineTo(toX, toY);
  }
  context.stroke();
  if (kind === 2) {
    context.fillRect(1, 1, 1.8, 1.8);
    context.fillRect(5, 5, 1.8, 1.8);
  }
}

/** A small sample of a series' area, beside its name. */
export function swatch(number: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.className = "swatch";
  canvas.setAttribute("aria-hidden", "true");
  const ratio = window.devicePixelRatio;
  canvas.width = Math.round(14 * ratio);
  canvas.height = Math.round(14 * ratio);
  const context = canvas.getContext("2d");
  if (context) {
    context.fillStyle = areaFill(number, ratio);
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.lineWidth = 2 * ratio;
    context.strokeStyle = seriesColour(number);
    context.strokeRect(0, 0, canvas.width, canvas.height);
  }
  return canvas;
}

/** Calls `redraw` whenever the system's dark or light mode changes. */
export function onColoursChange(redraw: () => void): void {
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
