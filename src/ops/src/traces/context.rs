//! Which trace, and which span of it, belongs to an object.

/// The rate at which all traces are sent.
pub(super) const MILLION: u32 = 1_000_000;

/// A span as others see it: its trace, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    pub(super) trace: u128,
    pub(super) span: u64,
}

impl SpanContext {
    /// The span of an object's whole life. All processes compute the same from its UID, so none must pass it on.
    #[must_use]
    pub fn of_object(uid: &str) -> Option<Self> {
        let trace = parse_uuid(uid)?;
        // The halves of a random UUID; zero would be invalid.
        let halves =
            [trace >> 64, trace & u128::from(u64::MAX)].map(|half| u64::try_from(half).unwrap_or_default());
        let [high, low] = halves;
        Some(Self {
            trace,
            span: (high ^ low).max(1),
        })
    }

    /// The context for a call, as W3C defines its header `traceparent`.
    #[must_use]
    pub fn traceparent(&self) -> String {
        format!("00-{:032x}-{:016x}-01", self.trace, self.span)
    }

    /// Whether the trace is one of those that are sent: by its last 56 bits, as OpenTelemetry samples.
    pub(super) fn is_sampled(&self, rate_per_million: u32) -> bool {
        let random = self.trace & ((1 << 56) - 1);
        random * u128::from(MILLION) < u128::from(rate_per_million) << 56
    }
}

fn parse_uuid(uid: &str) -> Option<u128> {
    let lengths = uid.split('-').map(str::len);
    if !lengths.eq([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = uid.replace('-', "");
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().filter(|trace| *trace != 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const UID: &str = "3fa1b2c4-0000-4abc-8def-0123456789ab";

    #[test]
    fn trace_is_the_uid_of_the_object() {
        let context = SpanContext::of_object(UID).unwrap();
        let expected = format!(
            "00-3fa1b2c400004abc8def0123456789ab-{:016x}-01",
            0x3fa1_b2c4_0000_4abc_u64 ^ 0x8def_0123_4567_89ab
        );
        assert_eq!(context.traceparent(), expected);
        for uid in [
            "",
            "uid-1",
            "00000000-0000-0000-0000-000000000000",
            "3fa1b2c4-0000-4abc-8def-0123456789ag",
            "3fa1b2c4-0000-4abc-8def-+123456789a",
            "3fa1b2c400004abc8def0123456789ab",
            "é3fa1b2-0000-4abc-8def-0123456789ab",
        ] {
            assert_eq!(SpanContext::of_object(uid), None, "{uid}");
        }
    }

    #[test]
    fn sampling_chooses_by_the_trace_alone() {
        let context = |low: u128| SpanContext {
            trace: (7 << 64) | low,
            span: 1,
        };
        let half = 1 << 55;
        for (trace, rate, sampled) in [
            (0, 0, false),
            (0, 1, true),
            (half - 1, 500_000, true),
            (half, 500_000, false),
            ((1 << 56) - 1, MILLION, true),
            ((1 << 56) - 1, MILLION - 1, false),
        ] {
            assert_eq!(context(trace).is_sampled(rate), sampled, "{trace} {rate}");
        }
    }
}
