// One direction of the traffic as stacked areas, with marks for events.

import uPlot from "uplot";
import { formatTick } from "./format.ts";
import { type Mark, type PlacedMark, placeMarks, type Severity } from "./marks.ts";
import { areaFill, cssColour, type SeriesNumbers, seriesColour } from "./patterns.ts";
import { stack } from "./series.ts";
import type { Values } from "./types.ts";

/** Height of a row of texts of marks (CSS px). */
const LABEL_ROW = 16;
/** An area must be this high at the right end for its name to be written into it (CSS px). */
const MIN_NAMED_HEIGHT = 15;
/** Highest value of the axis at least (bit/s), so that an idle tunnel does not look busy. */
const MIN_SCALE = 100_000;
const FONT = '12px system-ui, "Segoe UI", sans-serif';

export interface ChartData {
  times: readonly number[];
  keys: readonly string[];
  values: readonly Values[];
  marks: readonly Mark[];
  /** Range of the time axis (unix time, s). */
  from: number;
  to: number;
}

interface Options {
  numbers: SeriesNumbers;
  height: number;
  /** Rows for texts of marks above the areas. */
  labelRows: () => number;
  hasTimeAxis: boolean;
  formatTime: (time: number) => string;
  /** The pointer is at this sample; `null`: it has left the chart. */
  onPointer: (place: number | null) => void;
}

export class StackedChart {
  readonly element: HTMLElement;
  private plot: uPlot | undefined;
  private data: ChartData = { times: [], keys: [], values: [], marks: [], from: 0, to: 1 };
  private shape = "";
  private readonly options: Options;

  constructor(element: HTMLElement, options: Options) {
    this.element = element;
    this.options = options;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(element);
  }

  show(data: ChartData): void {
    this.data = data;
    const shape = JSON.stringify([data.keys, this.options.labelRows()]);
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      this.rebuild();
    }
    this.plot?.batch(() => {
      this.plot?.setData([[...data.times], ...stack(data.values)], false);
      this.plot?.setScale("x", { min: data.from, max: data.to });
    });
  }

  /** Draws anew with other colours. */
  rebuild(): void {
    this.plot?.destroy();
    const empty = this.data.keys.map((): Values => []);
    this.plot = new uPlot(this.plotOptions(), [[], ...empty], this.element);
    if (this.data.times.length > 0) {
      this.plot.setData([[...this.data.times], ...stack(this.data.values)], false);
      this.plot.setScale("x", { min: this.data.from, max: this.data.to });
    }
  }

  private size(): { width: number; height: number } {
    const rows = this.options.labelRows() * LABEL_ROW;
    return { width: Math.max(200, this.element.clientWidth), height: this.options.height + rows };
  }

  private plotOptions(): uPlot.Options {
    const { numbers, hasTimeAxis, formatTime, labelRows } = this.options;
    const [text, grid] = [cssColour("--muted"), cssColour("--grid")];
    const styles = this.data.keys.map((key) => numbers.of(key));
    const fills = styles.map((style) => areaFill(style, uPlot.pxRatio));
    const axis = { stroke: text, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      ...this.size(),
      padding: [labelRows() * LABEL_ROW + 8, 10, hasTimeAxis ? 0 : 6, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "rates" },
        points: { show: false },
        drag: { x: false, y: false, setScale: false },
      },
      scales: {
        x: { time: true, auto: false, range: () => [this.data.from, this.data.to] },
        y: { range: (_plot, _min, max) => [0, Math.max(MIN_SCALE, (max ?? 0) * 1.08)] },
      },
      axes: [
        {
          ...axis,
          show: hasTimeAxis,
          size: 26,
          space: (_plot, _axis, _min, _max, width) => (width < 640 ? 52 : 90),
          values: (_plot, splits) => splits.map(formatTime),
        },
        { ...axis, size: 48, space: 32, values: (_plot, splits) => splits.map(formatTick) },
      ],
      series: [
        {},
        ...this.data.keys.map((key, place) => ({
          label: key,
          stroke: () => seriesColour(styles[place] ?? 0),
          width: 1.5,
          points: { show: false },
          // Sums up to this series are filled down to those of the series before, the first one down to 0.
          ...(place === 0 && { fill: () => fills[0] ?? "" }),
        })),
      ],
      bands: this.data.keys.slice(1).map((_, place) => ({
        series: [place + 2, place + 1],
        fill: () => fills[place + 1] ?? "",
      })),
      hooks: {
        draw: [(plot) => this.drawNames(plot), (plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.options.onPointer(plot.cursor.idx ?? null)],
      },
    };
  }

  /** Writes the names of the series into their areas at the right end. */
  private drawNames(plot: uPlot): void {
    const sums = stack(this.data.values).map((values) => values.at(-1) ?? null);
    const { ctx: context, bbox } = plot;
    const ratio = uPlot.pxRatio;
    context.save();
    context.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.lineWidth = 4 * ratio;
    context.lineJoin = "round";
    context.strokeStyle = cssColour("--panel");
    context.fillStyle = cssColour("--text");
    this.data.keys.forEach((key, place) => {
      const sum = sums[place];
      if (sum === null || sum === undefined) return;
      const top = plot.valToPos(sum, "y", true);
      const bottom = plot.valToPos(place === 0 ? 0 : (sums[place - 1] ?? 0), "y", true);
      if (bottom - top < MIN_NAMED_HEIGHT * ratio) return;
      const [x, y] = [bbox.left + bbox.width - 8 * ratio, (top + bottom) / 2];
      context.strokeText(key, x, y);
      context.fillText(key, x, y);
    });
    context.restore();
  }

  private drawMarks(plot: uPlot): void {
    const { ctx: context, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const rows = this.options.labelRows();
    context.save();
    context.font = `${12 * ratio}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    const placed = placeMarks(
      this.data.marks,
      (time) => plot.valToPos(time, "x", true) / ratio,
      (text) => context.measureText(text).width / ratio + SYMBOL_WIDTH,
      [bbox.left / ratio, (bbox.left + bbox.width) / ratio],
      rows,
    );
    for (const mark of placed) this.drawMark(context, plot, mark, rows);
    context.restore();
  }

  private drawMark(context: CanvasRenderingContext2D, plot: uPlot, placed: PlacedMark, rows: number): void {
    const { mark, x, label } = placed;
    const ratio = uPlot.pxRatio;
    const { top, height } = plot.bbox;
    const colour = cssColour(SEVERITY_COLOURS[mark.severity]);
    const firstRow = top - rows * LABEL_ROW * ratio;
    // A mark without a text stays below the texts of others.
    const middle = label ? firstRow + (label.row + 0.5) * LABEL_ROW * ratio : top + 0.3 * LABEL_ROW * ratio;
    context.strokeStyle = colour;
    context.lineWidth = ratio;
    context.setLineDash([3 * ratio, 3 * ratio]);
    context.beginPath();
    context.moveTo(x * ratio, label ? middle : top);
    context.lineTo(x * ratio, top + height);
    context.stroke();
    context.setLineDash([]);
    if (rows === 0) return;
    context.fillStyle = colour;
    const isLeftOfLine = label !== undefined && label.left < x;
    const beside = isLeftOfLine ? -SYMBOL_WIDTH / 2 : SYMBOL_WIDTH / 2;
    drawSymbol(context, mark.severity, (label ? x + beside : x) * ratio, middle, ratio);
    if (!label) return;
    context.fillStyle = cssColour("--text");
    context.textAlign = "left";
    const textX = isLeftOfLine ? label.left : label.left + SYMBOL_WIDTH - 2;
    context.fillText(mark.text, textX * ratio, middle);
  }
}

/** Width of a mark's symbol and the space beside it (CSS px). */
const SYMBOL_WIDTH = 14;

const SEVERITY_COLOURS: Record<Severity, string> = { bad: "--bad", good: "--good", info: "--muted" };

/** The severity as a shape: a triangle downwards, a triangle upwards, or a square. */
function drawSymbol(
  context: CanvasRenderingContext2D,
  severity: Severity,
  x: number,
  y: number,
  ratio: number,
): void {
  const size = 4 * ratio;
  context.beginPath();
  if (severity === "info") {
    context.rect(x - size * 0.75, y - size * 0.75, size * 1.5, size * 1.5);
  } else {
    const tip = severity === "bad" ? size : -size;
    context.moveTo(x - size, y - tip);
    context.lineTo(x + size, y - tip);
    context.lineTo(x, y + tip);
  }
  context.fill();
}
