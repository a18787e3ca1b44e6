//! Byte counts in words.

/// Percentage of the bytes that are there, rounded down, at most 100; none of a total of 0.
#[must_use]
pub fn percent(done: u64, total: u64) -> Option<i32> {
    let percent = (u128::from(done) * 100).checked_div(u128::from(total))?;
    i32::try_from(percent.min(100)).ok()
}

/// Bytes in the unit that leaves one to three digits before the decimal point.
#[must_use]
pub fn format_bytes(count: u64) -> String {
    let mut scaled = u128::from(count) * 10;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if scaled < 10_240 {
            let tenths = if unit == "B" {
                String::new()
            } else {
                format!(".{}", scaled % 10)
            };
            return format!("{}{tenths} {unit}", scaled / 10);
        }
        scaled /= 1024;
    }
    format!("{}.{} TiB", scaled / 10, scaled % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_use_binary_units() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (300 << 20, "300.0 MiB"),
            (3 << 40, "3.0 TiB"),
        ] {
            assert_eq!(format_bytes(count), text);
        }
    }

    #[test]
    fn percentage_is_rounded_down() {
        assert_eq!(percent(0, 0), None);
        assert_eq!(
            [percent(1, 3), percent(3, 3), percent(4, 3)],
            [Some(33), Some(100), Some(100)]
        );
        assert_eq!(percent(u64::MAX - 1, u64::MAX), Some(99));
    }
}
