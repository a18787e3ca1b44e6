//! Structured logs on standard error, filtered by `RUST_LOG`.

use clap::ValueEnum;
use tracing_subscriber::filter::Targets;
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

/// Starts logging. `RUST_LOG` chooses what, as `LEVEL` or `TARGET=LEVEL,…` (default `info`); where it cannot
/// be read, that is logged. A second call does nothing.
pub fn init(format: Format) {
    let wanted = std::env::var("RUST_LOG").ok().filter(|w| !w.is_empty());
    let (filter, wrong) = filter(wanted.as_deref());
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
        .with(lines.with_filter(filter))
        .try_init();
    super::panics::log_panics();
    if let Some(why) = wrong {
        tracing::warn!(
            RUST_LOG = wanted,
            why,
            "RUST_LOG cannot be read; expected LEVEL or TARGET=LEVEL,…"
        );
    }
}

/// Targets and levels without patterns: the filter that takes patterns too would bring a regex engine along.
fn filter(wanted: Option<&str>) -> (Targets, Option<String>) {
    let info = || Targets::new().with_default(tracing::Level::INFO);
    match wanted.map(str::parse::<Targets>) {
        None => (info(), None),
        Some(Ok(targets)) => (targets, None),
        Some(Err(why)) => (info(), Some(why.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn rust_log_is_read_and_a_wrong_one_means_info() {
        let (quiet, wrong) = filter(Some("warn,kruise::cri=debug"));
        assert!(quiet.would_enable("kruise::cri::client", &Level::DEBUG) && wrong.is_none());
        assert!(!quiet.would_enable("kruise::node", &Level::INFO));
        let (info, wrong) = filter(Some("kruise=shout"));
        assert!(info.would_enable("kruise", &Level::INFO) && wrong.is_some());
    }
}
