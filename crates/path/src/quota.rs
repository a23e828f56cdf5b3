use derive_more::Display;

/// Seconds of a day.
const DAY: u64 = 86_400;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A day of the calendar, UTC.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, PartialOrd, Ord)]
#[display("{day} {}", MONTHS[usize::from(month - 1) % 12])]
pub struct Day {
    year: i64,
    /// From 1.
    month: u8,
    /// From 1.
    day: u8,
}

impl Day {
    /// The day of a moment, in seconds since 1970.
    pub fn of(unix: u64) -> Self {
        // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days: years that
        // begin in March have their leap day at the end.
        let days = (unix / DAY) as i64 + 719_468;
        let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * of_year + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: month as u8,
            day: (of_year - (153 * shifted + 2) / 5 + 1) as u8,
        }
    }

    /// Seconds from 1970 to the start of the day.
    pub fn unix(self) -> u64 {
        let year = if self.month <= 2 { self.year - 1 } else { self.year };
        let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
        let month = i64::from(self.month);
        let of_year =
            (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + i64::from(self.day) - 1;
        let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
        u64::try_from(era * 146_097 + of_era - 719_468).unwrap_or(0) * DAY
    }

    /// Day `day` of this month, or its last one.
    fn at(self, day: u8) -> Self {
        Self { day: day.clamp(1, self.month_days()), ..self }
    }

    fn month_days(self) -> u8 {
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        match self.month {
            4 | 6 | 9 | 11 => 30,
            2 if leap => 29,
            2 => 28,
            _ => 31,
        }
    }

    fn next_month(self) -> Self {
        match self.month {
            12 => Self { year: self.year + 1, month: 1, day: 1 },
            month => Self { month: month + 1, day: 1, ..self },
        }
    }

    fn last_month(self) -> Self {
        match self.month {
            1 => Self { year: self.year - 1, month: 12, day: 1 },
            month => Self { month: month - 1, day: 1, ..self },
        }
    }
}

/// A month for which a quota lasts: from its first day on, before the first day of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Month {
    /// Its first day.
    pub first: Day,
    /// The first day of the next one.
    pub next: Day,
}

impl Month {
    /// The month of a moment (seconds since 1970), where months begin on `day`, or on their last day if
    /// they are shorter.
    pub fn of(unix: u64, day: u8) -> Self {
        let today = Day::of(unix);
        let begun = today.at(day);
        if begun <= today {
            return Self { first: begun, next: today.next_month().at(day) };
        }
        Self { first: today.last_month().at(day), next: begun }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(year: i64, month: u8, day: u8) -> Day {
        Day { year, month, day }
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(Day::of(0), day(1970, 1, 1));
        assert_eq!(Day::of(951_782_400), day(2000, 2, 29));
        assert_eq!(Day::of(1_795_305_599), day(2026, 11, 21));
        assert_eq!(Day::of(1_795_305_600), day(2026, 11, 22));
        assert_eq!(day(2026, 12, 1).to_string(), "1 December");
        let mut before = Day::of(0);
        for n in 1..100_000u64 {
            let today = Day::of(n * DAY);
            assert_eq!(today.unix(), n * DAY, "{today:?}");
            let next = if before.day == before.month_days() {
                before.next_month()
            } else {
                day(before.year, before.month, before.day + 1)
            };
            assert_eq!(today, next, "day {n}");
            before = today;
        }
    }

    #[test]
    fn a_month_begins_on_its_day() {
        let month = |of: Day, on| {
            let month = Month::of(of.unix() + 12 * 3600, on);
            (month.first, month.next)
        };
        assert_eq!(month(day(2026, 11, 22), 1), (day(2026, 11, 1), day(2026, 12, 1)));
        assert_eq!(month(day(2026, 12, 31), 1), (day(2026, 12, 1), day(2027, 1, 1)));
        assert_eq!(month(day(2026, 11, 22), 22), (day(2026, 11, 22), day(2026, 12, 22)));
        assert_eq!(month(day(2026, 1, 5), 22), (day(2025, 12, 22), day(2026, 1, 22)));
    }

    #[test]
    fn months_that_are_too_short_begin_on_their_last_day_and_leave_no_gap() {
        for on in [1, 15, 28, 29, 30, 31] {
            let mut month = Month::of(0, on);
            for n in 0..3000 {
                let today = Month::of(n * DAY, on);
                if today != month {
                    assert_eq!(today.first, month.next, "day {n}, months begin on {on}");
                    month = today;
                }
                assert!(month.first.unix() <= n * DAY || n < 31);
                assert!(n * DAY < month.next.unix());
            }
        }
        assert_eq!(Month::of(day(2027, 2, 28).unix(), 31).first, day(2027, 2, 28));
    }
}
