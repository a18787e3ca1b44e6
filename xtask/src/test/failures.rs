//! What the tests that failed said, short enough to be read at the end of a long run.

/// Lines in which all failures are told; more than that only where there are very many.
const LINES: usize = 90;
/// Lines that each of them gets in any case.
const LEAST: usize = 6;
/// Characters of a line.
const WIDTH: usize = 800;

/// A test that failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failure {
    name: String,
    /// Where it panicked and what it said then.
    said: Vec<String>,
}

/// Finds the failures in what a run of cargo printed; where it broke off without any, the end of what it said.
pub(super) fn parse(job: &str, text: &str, ok: bool) -> Vec<Failure> {
    let mut found: Vec<Failure> = Vec::new();
    let mut failures = false;
    for line in text.lines() {
        let name = line
            .strip_prefix("---- ")
            .and_then(|l| l.strip_suffix(" stdout ----"));
        match (line, name) {
            // Once before what they said, once before the list of their names.
            ("failures:", _) => failures = !failures,
            ("successes:", _) => failures = false,
            (_, Some(name)) if failures => found.push(Failure {
                name: format!("{job}: {name}"),
                said: Vec::new(),
            }),
            _ if failures => {
                if let Some(last) = found.last_mut() {
                    last.said.push(line.to_owned());
                }
            }
            _ => {}
        }
    }
    if found.is_empty() && !ok {
        let lines: Vec<&str> = text.trim_end().lines().collect();
        let end = &lines[lines.len().saturating_sub(20)..];
        found.push(Failure {
            name: format!("{job} broke off"),
            said: end.iter().map(|l| (*l).to_owned()).collect(),
        });
    }
    found.iter_mut().for_each(Failure::shorten);
    found
}

impl Failure {
    /// Leaves what was printed before the panic, empty lines and advice.
    fn shorten(&mut self) {
        let panic = |line: &String| line.starts_with("thread '") && line.contains(" panicked at ");
        let begin = self.said.iter().position(panic).unwrap_or(0);
        self.said.drain(..begin);
        self.said
            .retain(|line| !line.trim().is_empty() && !line.starts_with("note: run with `RUST_BACKTRACE"));
    }

    /// Its lines, no more than `most`: of what is too long, beginning and end.
    fn lines(&self, most: usize) -> Vec<String> {
        let cut = |line: &String| line.chars().take(WIDTH).collect::<String>();
        let mut lines: Vec<String> = self.said.iter().map(cut).collect();
        if lines.len() > most {
            let (head, tail) = (most / 2, most - most / 2 - 1);
            let out = lines.len() - head - tail;
            lines.splice(head..head + out, [format!("... {out} lines left out ...")]);
        }
        lines
    }
}

/// All of them as the last words of a run: the fewer they are, the more is told of each.
pub(super) fn report(failures: &[&Failure]) -> String {
    let most = (LINES / failures.len().max(1)).max(LEAST) - 1;
    let told = |failure: &&Failure| {
        let mut text = format!("FAILED {}\n", failure.name);
        for line in failure.lines(most) {
            text += &format!("    {line}\n");
        }
        text
    };
    failures.iter().map(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
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
web: settled: not so after 120s; last seen: []
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
    fn failures_are_told_with_their_panic_alone() {
        let found = parse("real", SAID, false);
        let all: Vec<&Failure> = found.iter().collect();
        let expected = "\
FAILED real: beds::one
    thread 'beds::one' (12) panicked at tests/one.rs:3:5:
    web: settled: not so after 120s; last seen: []
    ==> end of kruise-manager.log
    leading
FAILED real: two
    Error: \"no\"
";
        assert_eq!(report(&all), expected);
        assert_eq!(parse("real", "test result: ok. 1 passed", true), []);
    }

    #[test]
    fn what_broke_off_is_told_by_its_end() {
        let found = parse("real", "running 2 tests\nsignal: 9, SIGKILL\n", false);
        let all: Vec<&Failure> = found.iter().collect();
        let expected = "FAILED real broke off\n    running 2 tests\n    signal: 9, SIGKILL\n";
        assert_eq!(report(&all), expected);
    }

    #[test]
    fn many_failures_share_the_last_lines() {
        let failure = |n: usize| Failure {
            name: n.to_string(),
            said: (0..50).map(|line| format!("line {line}")).collect(),
        };
        for count in [1, 2, 7, 15] {
            let all: Vec<Failure> = (0..count).map(failure).collect();
            let text = report(&all.iter().collect::<Vec<_>>());
            assert!(text.lines().count() <= LINES, "{count}: {text}");
            assert_eq!(text.matches("FAILED").count(), count);
            assert_eq!(text.matches("    line 0\n").count(), count);
            assert_eq!(text.matches("    line 49\n").count(), count);
        }
    }
}
