//! When the access of a user ends.

use std::{fmt, str::FromStr, time::SystemTime};

use time::{
    Date, OffsetDateTime, Time, UtcOffset, format_description::well_known::Rfc3339,
    macros::format_description,
};

use mpvpn_input::{Error, Result, values::Text};

/// When the access of a user ends: a moment in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Expiry(OffsetDateTime);

impl Expiry {
    /// The end of the day that is `days` days after `now`.
    pub fn in_days(now: SystemTime, days: u16) -> Self {
        let day = OffsetDateTime::from(now).to_offset(UtcOffset::UTC).date();
        Self::end_of(day.saturating_add(time::Duration::days(days.into())))
    }

    fn end_of(day: Date) -> Self {
        let next = day.next_day().unwrap_or(Date::MAX);
        Self(next.with_time(Time::MIDNIGHT).assume_utc())
    }

    /// The moment.
    pub fn at(self) -> SystemTime {
        self.0.into()
    }
}

impl fmt::Display for Expiry {
    /// The last day of the access, or the moment if it does not end at midnight.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last_day = self.0.date().previous_day().filter(|_| self.0.time() == Time::MIDNIGHT);
        let text = match last_day {
            Some(day) => day.format(format_description!("[year]-[month]-[day]")),
            None => self.0.format(&Rfc3339),
        };
        f.write_str(&text.map_err(|_| fmt::Error)?)
    }
}

impl Text for Expiry {
    const EXPECTED: &'static str = "the last day, or a moment in UTC, in quotes";
    const EXAMPLE: &'static str = "2027-01-31";

    fn read(text: &str) -> std::result::Result<Self, String> {
        let day = Date::parse(text, format_description!("[year]-[month]-[day]")).map(Self::end_of);
        let moment = || OffsetDateTime::parse(text, &Rfc3339).map(|at| Self(at.to_offset(UtcOffset::UTC)));
        day.or_else(|_| moment()).map_err(|_| {
            format!("`{text}` is not a date: expected the last day, as in 2027-01-31, or a moment, as in 2027-01-31T18:00:00Z")
        })
    }
}

/// A date of `--expires`: a number of days from now, or as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryOption {
    /// Days from now.
    In(u16),
    /// A date.
    At(Expiry),
}

impl ExpiryOption {
    /// The date.
    pub fn resolve(self, now: SystemTime) -> Expiry {
        match self {
            Self::In(days) => Expiry::in_days(now, days),
            Self::At(expiry) => expiry,
        }
    }

    /// The date, for a change of the users at `now`.
    ///
    /// # Errors
    /// If the date has passed.
    pub fn resolve_ahead(self, now: SystemTime) -> Result<Expiry> {
        let expiry = self.resolve(now);
        if expiry.at() <= now {
            let next = "name a day from today on, or a number of days, as in 90d; `mpvpn user revoke NAME` ends access now";
            return Err(Error::usage(format!("--expires {expiry} has passed"), next.to_owned()));
        }
        Ok(expiry)
    }
}

impl FromStr for ExpiryOption {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let days = text.strip_suffix('d').and_then(|days| days.parse().ok());
        match days {
            Some(days) => Ok(Self::In(days)),
            None => Expiry::read(text).map(Self::At).map_err(|_| {
                format!("`{text}` is neither a number of days, as in 90d, nor the last day, as in 2027-01-31")
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_date_that_has_passed_is_refused_with_what_to_do() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let resolve = |text: &str| text.parse::<ExpiryOption>().unwrap().resolve_ahead(now);
        let error = resolve("2020-01-01").unwrap_err().to_string();
        assert!(error.contains("--expires 2020-01-01 has passed"), "{error}");
        // 1,800,000,000 is 2027-01-15T08:00:00Z.
        assert!(resolve("2027-01-14").is_err() && resolve("2027-01-15T08:00:00Z").is_err());
        assert!(resolve("2027-01-15").is_ok() && resolve("2027-01-15T08:00:01Z").is_ok());
        assert!(resolve("0d").is_ok(), "until the end of today");
    }
}
