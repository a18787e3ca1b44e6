//! When something happens again: the schedule of a CronJob, in UTC.

use std::fmt;

use cronexpr::{Crontab, FallbackTimezoneOption, MakeTimestamp, ParseOptions};
use jiff::{SignedDuration, Timestamp};

/// Maximum length of a schedule, in characters.
pub const MAX_LENGTH: usize = 128;
/// What a schedule looks like: five fields, and no time zone, whose name would be looked up among files.
pub const PATTERN: &str = "^[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4}$";
/// No time is looked for later than this; the library looks four years ahead.
const HORIZON: SignedDuration = SignedDuration::from_hours(5 * 366 * 24);

/// A schedule that names at least one time in the next years.
#[derive(Clone)]
pub struct Schedule(Crontab);

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Schedule")
    }
}

impl Schedule {
    /// Parses the five fields: minute, hour, day of month, month, day of week.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(text: &str) -> Result<Self, String> {
        const EXPECTED: &str =
            "expected five fields: minute, hour, day of month, month, day of week, such as \"0 2 * * *\"";
        if text.len() > MAX_LENGTH || text.split_ascii_whitespace().count() != 5 {
            return Err(EXPECTED.to_owned());
        }
        let mut options = ParseOptions::default();
        options.fallback_timezone_option = FallbackTimezoneOption::UTC;
        let parsed = cronexpr::parse_crontab_with(text, options).map(Self);
        // The library's own text draws an arrow over several lines.
        let schedule = parsed.map_err(|error| {
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default();
            format!("{}; {EXPECTED}", reason.trim_start_matches([' ', '^']))
        })?;
        let start = Timestamp::UNIX_EPOCH;
        if schedule.next_after(start).is_none() {
            return Err("no such day exists".to_owned());
        }
        Ok(schedule)
    }

    /// The first time after this one.
    #[must_use]
    pub fn next_after(&self, time: Timestamp) -> Option<Timestamp> {
        time.checked_add(HORIZON).ok()?;
        let next = self.0.find_next(MakeTimestamp(time)).ok()?;
        Some(next.timestamp())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn next(schedule: &str, after: &str) -> String {
        let next = Schedule::parse(schedule)
            .unwrap()
            .next_after(after.parse().unwrap());
        next.unwrap().to_string()
    }

    #[test]
    fn next_time_is_in_utc() {
        let after = "2026-11-27T03:34:31Z";
        for (schedule, expected) in [
            ("0 2 * * *", "2026-11-28T02:00:00Z"),
            ("*/15 * * * *", "2026-11-27T03:45:00Z"),
            ("30 22 * * MON-FRI", "2026-11-27T22:30:00Z"),
            ("0 0 1 1 *", "2027-01-01T00:00:00Z"),
            ("0 0 29 2 *", "2028-02-29T00:00:00Z"),
        ] {
            assert_eq!(next(schedule, after), expected, "{schedule}");
        }
        assert_eq!(next("0 2 * * *", "2026-11-28T02:00:00Z"), "2026-11-29T02:00:00Z");
        let daily = Schedule::parse("0 2 * * *").unwrap();
        assert_eq!(daily.next_after(Timestamp::MAX), None);
    }

    #[test]
    fn mistakes_are_named() {
        for (schedule, why) in [
            ("", "expected five fields"),
            ("@daily", "expected five fields"),
            ("0 2 * * * UTC", "expected five fields"),
            ("0 2 * * * ../../etc/passwd", "expected five fields"),
            ("60 2 * * *", "60"),
            ("H 2 * * *", "expected five fields"),
            ("0 2 30 2 *", "no such day exists"),
        ] {
            let error = Schedule::parse(schedule).unwrap_err();
            assert!(
                error.contains(why) && !error.contains('\n'),
                "{schedule:?}: {error}"
            );
        }
    }

    proptest! {
        #[test]
        fn anything_is_parsed_or_refused(text in r"[0-9A-Za-z*,/# -]{0,40}|(\S{1,6} ){4}\S{1,6}", seconds in -377_705_023_201_i64..=253_402_207_200) {
            if let Ok(schedule) = Schedule::parse(&text) {
                let time = Timestamp::from_second(seconds).unwrap();
                prop_assert!(schedule.next_after(time).is_none_or(|next| next > time));
            }
        }
    }
}
