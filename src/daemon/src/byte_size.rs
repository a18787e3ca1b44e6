//! Byte counts in words.

/// Bytes in the unit that leaves one to three digits before the decimal point.
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
}
