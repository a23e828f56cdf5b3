//! A table of a live screen: columns, and rows that can be sorted and filtered.

use std::cmp::Ordering;

use mpvpn_status::UNKNOWN;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Characters that the column takes at least.
    pub(super) width: u16,
    /// Whether cells are aligned to the right.
    pub(super) is_number: bool,
}

/// A column of text.
pub(super) const fn text(title: &'static str, width: u16) -> Column {
    Column { title, width, is_number: false }
}

/// A column of numbers.
pub(super) const fn number(title: &'static str, width: u16) -> Column {
    Column { title, width, is_number: true }
}

/// A cell: what is shown, and for numbers what it is sorted by.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) text: String,
    order: Option<f64>,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), order: None }
    }

    pub(super) fn number(order: f64, text: String) -> Self {
        Self { text, order: Some(order) }
    }

    /// A number that is not known.
    pub(super) fn unknown() -> Self {
        Self { text: UNKNOWN.to_owned(), order: Some(f64::NEG_INFINITY) }
    }

    fn compare(&self, other: &Self) -> Ordering {
        match (self.order, other.order) {
            (Some(own), Some(others)) => own.total_cmp(&others),
            _ => self.text.cmp(&other.text),
        }
    }
}

/// How well the thing of a row works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Health {
    #[default]
    Works,
    /// It works and is not used now, or it is about to work.
    Waits,
    Fails,
}

/// A row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// Name of the thing: unique in its sheet, so that the selection stays with it.
    pub(super) key: String,
    pub(super) cells: Vec<Cell>,
    pub(super) health: Health,
    /// Rates of the last minutes (bit/s), for the bars at the end of the row; empty without.
    pub(super) history: Vec<f64>,
    /// Details that do not fit into the row; shown for the selected one.
    pub(super) detail: String,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sheet {
    pub(super) columns: &'static [Column],
    pub(super) rows: Vec<Row>,
}

/// The order of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sorting {
    /// The column; `None` leaves the order as it came.
    pub(super) column: Option<usize>,
    pub(super) is_reversed: bool,
}

impl Sheet {
    /// Keeps the rows in which a cell or the detail contains `filter`, in any case of letters, and sorts
    /// them: numbers from high to low, texts from A to Z, unless reversed.
    pub(super) fn arrange(&mut self, filter: &str, sorting: Sorting) {
        if !filter.is_empty() {
            let filter = filter.to_lowercase();
            let contains = |text: &str| text.to_lowercase().contains(&filter);
            self.rows.retain(|row| {
                contains(&row.key)
                    || contains(&row.detail)
                    || row.cells.iter().any(|cell| contains(&cell.text))
            });
        }
        if let Some(column) = sorting.column.filter(|column| *column < self.columns.len()) {
            let from_high = self.columns[column].is_number;
            self.rows.sort_by(|a, b| {
                let order = a.cells[column].compare(&b.cells[column]);
                if from_high { order.reverse() } else { order }
            });
        }
        if sorting.is_reversed {
            self.rows.reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[text("link", 4), number("rate", 4)];

    fn sheet() -> Sheet {
        let row = |name: &str, rate: f64, detail: &str| Row {
            key: name.into(),
            cells: vec![Cell::text(name), Cell::number(rate, rate.to_string())],
            health: Health::Works,
            history: Vec::new(),
            detail: detail.into(),
        };
        let mut rows = vec![row("wlan0", 9.0, ""), row("eth0", 10.0, "no Carrier"), row("wwan0", 2.0, "")];
        rows[2].cells[1] = Cell::unknown();
        Sheet { columns: COLUMNS, rows }
    }

    fn keys(sheet: &Sheet) -> Vec<&str> {
        sheet.rows.iter().map(|row| row.key.as_str()).collect()
    }

    #[test]
    fn numbers_are_sorted_from_high_to_low_and_unknown_ones_come_last() {
        for (column, is_reversed, expected) in [
            (None, false, ["wlan0", "eth0", "wwan0"]),
            (Some(0), false, ["eth0", "wlan0", "wwan0"]),
            (Some(1), false, ["eth0", "wlan0", "wwan0"]),
            (Some(1), true, ["wwan0", "wlan0", "eth0"]),
            (Some(7), false, ["wlan0", "eth0", "wwan0"]),
        ] {
            let mut sheet = sheet();
            sheet.arrange("", Sorting { column, is_reversed });
            assert_eq!(keys(&sheet), expected, "{column:?} {is_reversed}");
        }
    }

    #[test]
    fn a_filter_looks_into_cells_and_details() {
        for (filter, expected) in [("WLAN", &["wlan0"][..]), ("carrier", &["eth0"]), ("x", &[])] {
            let mut sheet = sheet();
            sheet.arrange(filter, Sorting::default());
            assert_eq!(keys(&sheet), expected, "{filter}");
        }
    }
}
