//! The process's metrics, in the OpenMetrics text format.
//!
//! One registry for the process: what counts a call should not have to be handed a registry first.

use std::sync::LazyLock;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// Label names with their values.
pub type Labels<const N: usize> = [(&'static str, String); N];
/// A histogram of seconds for each set of labels.
pub type Durations<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// Everything that we count. Names in the output carry the prefix `kruise_`.
pub struct Metrics {
    registry: Registry,
    /// Writes to the API server by `kind`, `verb` and `result` (`ok` or an error category).
    pub api_writes: Family<Labels<3>, Counter>,
    /// Answers to admission and conversion reviews by `kind`, `step` (mutate, validate, convert) and `result`
    /// (allowed, refused, failed).
    pub reviews: Family<Labels<3>, Counter>,
    /// Broken watches by `kind`.
    pub watch_errors: Family<Labels<1>, Counter>,
    /// Panics that ended one request or one pass, by `task`.
    pub panics: Family<Labels<1>, Counter>,
    /// Events that were not written because the queue was full or the API server refused.
    pub events_dropped: Counter,
    /// Calls to the container runtime by `method` and `result`, in seconds.
    pub cri_calls: Durations<2>,
    /// Image pulls from their start to their end by `result`, in seconds.
    pub image_pulls: Durations<1>,
    /// Image tags that wait for a free slot.
    pub image_pull_queue: Gauge,
    /// Image tags that are being pulled.
    pub image_pull_active: Gauge,
    /// Container recreate requests from their first sight to their completion by `result`, in seconds.
    pub recreates: Durations<1>,
    /// Container recreate requests in progress.
    pub recreate_active: Gauge,
    /// Containers that were restarted for their environment, by `result` (`ok` or an error category).
    pub environment_restarts: Family<Labels<1>, Counter>,
    /// Passes over a CloneSet by `result`: `idle` where nothing was to be done, `acted`, or an error category.
    pub cloneset_passes: Durations<1>,
    /// What is done about CloneSets by `act` and `result` (`ok` or an error category).
    pub cloneset_acts: Family<Labels<2>, Counter>,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// The process's metrics.
#[must_use]
pub fn metrics() -> &'static Metrics {
    &METRICS
}

fn call_seconds() -> Histogram {
    Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0])
}

fn work_seconds() -> Histogram {
    Histogram::new([0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0])
}

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("kruise"),
            api_writes: Family::default(),
            reviews: Family::default(),
            watch_errors: Family::default(),
            panics: Family::default(),
            events_dropped: Counter::default(),
            cri_calls: Family::new_with_constructor(call_seconds),
            image_pulls: Family::new_with_constructor(work_seconds),
            image_pull_queue: Gauge::default(),
            image_pull_active: Gauge::default(),
            recreates: Family::new_with_constructor(work_seconds),
            recreate_active: Gauge::default(),
            environment_restarts: Family::default(),
            cloneset_passes: Family::new_with_constructor(call_seconds),
            cloneset_acts: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        r.register("build", "The version of this program", build);
        r.register("api_writes", "Writes to the API server", self.api_writes.clone());
        r.register(
            "reviews",
            "Answers to admission and conversion reviews",
            self.reviews.clone(),
        );
        r.register("watch_errors", "Watches that broke", self.watch_errors.clone());
        r.register(
            "panics",
            "Panics that ended one request or one pass",
            self.panics.clone(),
        );
        r.register(
            "events_dropped",
            "Events that were not written",
            self.events_dropped.clone(),
        );
        r.register_with_unit(
            "cri_call",
            "Calls to the container runtime",
            Unit::Seconds,
            self.cri_calls.clone(),
        );
        r.register_with_unit(
            "image_pull",
            "Image pulls, waiting not counted",
            Unit::Seconds,
            self.image_pulls.clone(),
        );
        r.register(
            "image_pull_queue",
            "Image tags that wait for a slot",
            self.image_pull_queue.clone(),
        );
        r.register(
            "image_pull_active",
            "Image tags being pulled",
            self.image_pull_active.clone(),
        );
        r.register_with_unit(
            "recreate",
            "Container recreate requests",
            Unit::Seconds,
            self.recreates.clone(),
        );
        let active = self.recreate_active.clone();
        r.register("recreate_active", "Container recreate requests in work", active);
        let restarts = self.environment_restarts.clone();
        r.register("environment_restarts", "Restarts for the environment", restarts);
        self.register_clone_sets();
    }

    fn register_clone_sets(&mut self) {
        let passes = self.cloneset_passes.clone();
        let r = &mut self.registry;
        r.register_with_unit("cloneset_pass", "Passes over a CloneSet", Unit::Seconds, passes);
        r.register(
            "cloneset_acts",
            "What is done about CloneSets",
            self.cloneset_acts.clone(),
        );
    }

    /// Counts a call to the container runtime.
    pub fn cri_call(&self, method: &'static str, result: &'static str, took: Duration) {
        let labels = [("method", method.to_owned()), ("result", result.to_owned())];
        self.cri_calls.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// All metrics as text.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_read_as_they_are_documented() {
        metrics().cri_call("PullImage", "ok", Duration::from_millis(20));
        let text = metrics().render();
        for want in [
            "kruise_build_info{version=",
            "kruise_cri_call_seconds_count{method=\"PullImage\",result=\"ok\"}",
            "kruise_image_pull_queue 0",
        ] {
            assert!(text.contains(want), "{want} is not in:\n{text}");
        }
    }
}
