//! Structured logs on standard error, filtered by `RUST_LOG`.

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, LevelFilter, Targets, filter_fn};
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One line of text with `key=value` fields.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging. `RUST_LOG` sets the levels, as `LEVEL` or `TARGET=LEVEL,…` (default `info`); a value that cannot be
/// read is logged. A second call does nothing.
pub fn init(format: Format) {
    let directives = std::env::var("RUST_LOG").ok().filter(|w| !w.is_empty());
    let (filter, invalid) = filter(directives.as_deref());
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        Format::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            layer().with_ansi(colours).with_writer(std::io::stderr).boxed()
        }
        Format::Json => layer()
            .json()
            .flatten_event(true)
            .with_writer(std::io::stderr)
            .boxed(),
    };
    let _ = tracing_subscriber::registry()
        .with(lines.with_filter(filter.and(filter_fn(is_safe_to_log))))
        .try_init();
    super::panics::log_panics();
    if let Some(why) = invalid {
        tracing::warn!(
            RUST_LOG = directives,
            why,
            "RUST_LOG cannot be read; expected LEVEL or TARGET=LEVEL,…"
        );
    }
}

/// All lines except kube's client below level error: it logs the whole text of a response that it cannot read, and that
/// may be a list of Secrets.
fn is_safe_to_log(line: &Metadata) -> bool {
    let from_kube_client = line.target().split("::").next() == Some("kube_client");
    !from_kube_client || *line.level() == Level::ERROR
}

/// Targets and levels without patterns: the filter with patterns needs a regex engine.
fn filter(directives: Option<&str>) -> (Targets, Option<String>) {
    let info = || Targets::new().with_default(Level::INFO);
    match directives.map(parse_directives) {
        None => (info(), None),
        Some(Ok(targets)) => (targets, None),
        Some(Err(why)) => (info(), Some(why)),
    }
}

/// Reads `LEVEL` and `TARGET=LEVEL`. The parser of [`Targets`] accepts more: `bogus` and `bogus=` as targets, which
/// switch all others off.
fn parse_directives(directives: &str) -> Result<Targets, String> {
    let mut targets = Targets::new();
    for part in directives
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (target, level) = part.split_once('=').unwrap_or(("", part));
        let level_filter: Option<LevelFilter> = level.parse().ok().filter(|_| !level.is_empty());
        let Some(level_filter) = level_filter else {
            return Err(format!(
                "{level:?} in {part:?} is not one of off, error, warn, info, debug and trace"
            ));
        };
        let is_target_char = |c: char| c.is_ascii_alphanumeric() || "_:-".contains(c);
        targets = match target {
            "" if part == level => targets.with_default(level_filter),
            target if !target.is_empty() && target.chars().all(is_target_char) => {
                targets.with_target(target, level_filter)
            }
            _ => return Err(format!("{target:?} in {part:?} is not a target")),
        };
    }
    Ok(targets)
}

/// The lines of level INFO and above that `work` logs in this thread. One subscriber serves all threads: while one
/// thread's subscriber is added or removed, tracing may treat another thread's lines as disabled.
#[cfg(any(test, feature = "testing"))]
pub fn captured_lines(work: impl FnOnce()) -> Vec<String> {
    static SUBSCRIBED: std::sync::Once = std::sync::Once::new();
    SUBSCRIBED.call_once(|| {
        let layer = layer().with_ansi(false).with_writer(|| ThreadWriter);
        let registry = tracing_subscriber::registry().with(layer.with_filter(filter(None).0));
        let _ = tracing::subscriber::set_global_default(registry);
    });
    LINES.take();
    work();
    let bytes = LINES.take();
    String::from_utf8_lossy(&bytes)
        .lines()
        .map(str::to_owned)
        .collect()
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// The lines that this thread has logged.
    static LINES: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[cfg(any(test, feature = "testing"))]
/// Writes to [`LINES`].
struct ThreadWriter;

#[cfg(any(test, feature = "testing"))]
impl std::io::Write for ThreadWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LINES.with_borrow_mut(|lines| lines.extend_from_slice(bytes));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct CapturedLines(Arc<Mutex<Vec<u8>>>);

    impl CapturedLines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for CapturedLines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn unreadable_kube_responses_are_never_logged() {
        for directives in [
            None,
            Some("trace"),
            Some("kube_client=trace,kube_client::client=trace,info"),
        ] {
            let lines = CapturedLines::default();
            let writer = lines.clone();
            let lines_of = layer().with_writer(move || writer.clone());
            let registry = tracing_subscriber::registry()
                .with(lines_of.with_filter(filter(directives).0.and(filter_fn(is_safe_to_log))));
            tracing::subscriber::with_default(registry, || {
                tracing::warn!(target: "kube_client::client", "SecretList");
                tracing::warn!(target: "kube_client", "SecretList");
                tracing::error!(target: "kube_client::client::builder", "no connection");
                tracing::warn!(target: "kruise_cluster", "slow");
            });
            let text = lines.text();
            assert!(!text.contains("SecretList"), "{text}");
            assert!(text.contains("no connection") && text.contains("slow"), "{text}");
        }
    }

    #[test]
    fn invalid_rust_log_falls_back_to_info() {
        let (quiet, wrong) = filter(Some("warn,kruise_cri=debug"));
        assert!(quiet.would_enable("kruise_cri::client", &Level::DEBUG) && wrong.is_none());
        assert!(!quiet.would_enable("kruise::node", &Level::INFO));
        for wrong in [
            "kruise=shout",
            "bogus=",
            "bogus",
            "=debug",
            "a b=info",
            "info,x=y=z",
            "=",
            "kruise:debug",
        ] {
            let (info, why) = filter(Some(wrong));
            assert!(
                info.would_enable("kruise", &Level::INFO) && why.is_some(),
                "{wrong}: {why:?}"
            );
            assert!(!info.would_enable("kruise", &Level::DEBUG), "{wrong}");
        }
    }
}
