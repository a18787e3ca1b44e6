//! Messages of the failed tests, short enough to be read at the end of a long run.

/// Maximum number of lines for all failures, exceeded only if there are very many.
const MAX_LINES: usize = 90;
/// Minimum number of lines for each failure.
const MIN_LINES_PER_FAILURE: usize = 6;
/// Maximum length of a line.
const MAX_LINE_CHARS: usize = 800;

/// A test that failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestFailure {
    name: String,
    /// Location and message of its panic.
    output: Vec<String>,
}

/// Finds the failures in cargo's output; if it aborted without any, the last lines of the output.
pub(super) fn parse_failures(job: &str, text: &str, ok: bool) -> Vec<TestFailure> {
    let mut found: Vec<TestFailure> = Vec::new();
    let mut in_failures = false;
    for line in text.lines() {
        let name = line
            .strip_prefix("---- ")
            .and_then(|l| l.strip_suffix(" stdout ----"));
        match (line, name) {
            // Once before the messages, once before the list of names.
            ("failures:", _) => in_failures = !in_failures,
            ("successes:", _) => in_failures = false,
            (_, Some(name)) if in_failures => found.push(TestFailure {
                name: format!("{job}: {name}"),
                output: Vec::new(),
            }),
            _ if in_failures => {
                if let Some(last) = found.last_mut() {
                    last.output.push(line.to_owned());
                }
            }
            _ => {}
        }
    }
    if found.is_empty() && !ok {
        let lines: Vec<&str> = text.trim_end().lines().collect();
        let end = &lines[lines.len().saturating_sub(20)..];
        found.push(TestFailure {
            name: format!("{job} broke off"),
            output: end.iter().map(|l| (*l).to_owned()).collect(),
        });
    }
    found.iter_mut().for_each(TestFailure::trim_output);
    found
}

impl TestFailure {
    /// Drops what was printed before the panic, empty lines and hints.
    fn trim_output(&mut self) {
        let panic = |line: &String| line.starts_with("thread '") && line.contains(" panicked at ");
        let begin = self.output.iter().position(panic).unwrap_or(0);
        self.output.drain(..begin);
        self.output
            .retain(|line| !line.trim().is_empty() && !line.starts_with("note: run with `RUST_BACKTRACE"));
    }

    /// At most `max_lines` lines: if there are more, the first and the last.
    fn lines(&self, max_lines: usize) -> Vec<String> {
        let truncate = |line: &String| line.chars().take(MAX_LINE_CHARS).collect::<String>();
        let mut lines: Vec<String> = self.output.iter().map(truncate).collect();
        if lines.len() > max_lines {
            let (head, tail) = (max_lines / 2, max_lines - max_lines / 2 - 1);
            let omitted = lines.len() - head - tail;
            lines.splice(
                head..head + omitted,
                [format!("... {omitted} lines left out ...")],
            );
        }
        lines
    }
}

/// All failures, for the end of a run: the fewer there are, the more lines each gets.
pub(super) fn report(failures: &[&TestFailure]) -> String {
    let max_lines = (MAX_LINES / failures.len().max(1)).max(MIN_LINES_PER_FAILURE) - 1;
    let format_failure = |failure: &&TestFailure| {
        let mut text = format!("FAILED {}\n", failure.name);
        for line in failure.lines(max_lines) {
            text += &format!("    {line}\n");
        }
        text
    };
    failures.iter().map(format_failure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARGO_OUTPUT: &str = "\
running 3 tests
.F.
successes:

---- good stdout ----
fine

successes:
    good

failures:

---- beds::one stdout ----
KRUISE_SEED=5

thread 'beds::one' (12) panicked at tests/one.rs:3:5:
web: not so after 120s; last seen: []
==> end of kruise-manager.log
leading
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace

---- two stdout ----
Error: \"no\"


failures:
    beds::one
    two

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn failures_are_reported_from_their_panic() {
        let found = parse_failures("real", CARGO_OUTPUT, false);
        let all: Vec<&TestFailure> = found.iter().collect();
        let expected = "\
FAILED real: beds::one
    thread 'beds::one' (12) panicked at tests/one.rs:3:5:
    web: not so after 120s; last seen: []
    ==> end of kruise-manager.log
    leading
FAILED real: two
    Error: \"no\"
";
        assert_eq!(report(&all), expected);
        assert_eq!(parse_failures("real", "test result: ok. 1 passed", true), []);
    }

    #[test]
    fn aborted_run_is_reported_by_its_last_lines() {
        let found = parse_failures("real", "running 2 tests\nsignal: 9, SIGKILL\n", false);
        let all: Vec<&TestFailure> = found.iter().collect();
        let expected = "FAILED real broke off\n    running 2 tests\n    signal: 9, SIGKILL\n";
        assert_eq!(report(&all), expected);
    }

    #[test]
    fn report_length_is_bounded_for_many_failures() {
        let failure = |n: usize| TestFailure {
            name: n.to_string(),
            output: (0..50).map(|line| format!("line {line}")).collect(),
        };
        for count in [1, 2, 7, 15] {
            let all: Vec<TestFailure> = (0..count).map(failure).collect();
            let text = report(&all.iter().collect::<Vec<_>>());
            assert!(text.lines().count() <= MAX_LINES, "{count}: {text}");
            assert_eq!(text.matches("FAILED").count(), count);
            assert_eq!(text.matches("    line 0\n").count(), count);
            assert_eq!(text.matches("    line 49\n").count(), count);
        }
    }
}
