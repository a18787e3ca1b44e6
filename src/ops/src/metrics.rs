//! The process's metrics, in the OpenMetrics text format.
//!
//! One registry for the process, so that code which counts calls needs no registry argument.

use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::process::ProcessCollector;

/// Label names with their values.
pub type Labels<const N: usize> = [(&'static str, String); N];
/// A histogram of seconds for each set of label values.
pub type Durations<const N: usize> = MetricFamily<N, Histogram>;

/// A metric with one series for each set of label values.
#[derive(Debug)]
pub struct MetricFamily<const N: usize, M> {
    /// The names of the labels, in the order in which callers give them: alerts and dashboards refer to them.
    label_names: [&'static str; N],
    series: Family<Labels<N>, M>,
}

impl<const N: usize, M: Clone + Default> MetricFamily<N, M> {
    fn new(label_names: [&'static str; N]) -> Self {
        let series = Family::default();
        Self { label_names, series }
    }
}

impl<const N: usize, M: Clone> MetricFamily<N, M> {
    fn new_with_constructor(label_names: [&'static str; N], constructor: fn() -> M) -> Self {
        let series = Family::new_with_constructor(constructor);
        Self { label_names, series }
    }

    /// The series with these labels. It is locked until the result is dropped.
    pub fn get_or_create(&self, labels: &Labels<N>) -> impl Deref<Target = M> + '_ {
        self.assert_names(labels);
        self.series.get_or_create(labels)
    }

    /// The series with these labels, without a lock.
    pub fn get_or_create_owned(&self, labels: &Labels<N>) -> M {
        self.assert_names(labels);
        self.series.get_or_create_owned(labels)
    }

    /// Removes the series with these labels, and returns whether it existed.
    pub fn remove(&self, labels: &Labels<N>) -> bool {
        self.assert_names(labels);
        self.series.remove(labels)
    }

    fn assert_names(&self, labels: &Labels<N>) {
        debug_assert_eq!(labels.each_ref().map(|(name, _)| *name), self.label_names);
    }

    /// Creates the series whose labels all have `value`, so that the metric is rendered before it counts anything.
    fn create(&self, value: &str) {
        drop(self.get_or_create(&self.label_names.map(|name| (name, value.to_owned()))));
    }
}

/// Kinds and steps of the reviews that `kruise-webhook` answers. A review of kind `other` is about no known kind.
const REVIEW_STEPS: &[(&str, &[&str])] = &[
    ("cloneset", &["mutate", "validate", "convert"]),
    ("nodeimage", &["mutate", "validate", "convert"]),
    ("imagepulljob", &["mutate", "validate"]),
    ("imagelistpulljob", &["mutate", "validate"]),
    ("containerrecreaterequest", &["mutate", "convert"]),
    ("sidecarset", &["mutate", "validate", "convert"]),
    ("pod", &["mutate"]),
    ("namespace", &["validate"]),
    ("other", &["read", "convert"]),
];

/// Which program this is: each exposes only the metrics that it can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// kruise-daemon.
    Daemon,
    /// kruise-manager.
    Manager,
}

/// All metrics. Their names have the prefix `kruise_`, except those that are the same in all programs of Kubernetes.
pub struct Metrics {
    registry: Registry,
    /// Whether this process holds the Lease of that `name`: 1 or 0.
    pub leader: MetricFamily<1, Gauge>,
    /// Objects that wait for a free worker, by the controller's `name`.
    pub queue_depth: MetricFamily<1, Gauge>,
    /// Reconciles that failed and are retried, by the controller's `name`.
    pub queue_retries: MetricFamily<1, Counter>,
    /// Writes to the API server by `kind`, `verb` and `result` (`ok` or an error category).
    pub api_writes: MetricFamily<3, Counter>,
    /// Responses to admission and conversion reviews by `kind`, `step` (mutate, validate, convert) and `result`
    /// (allowed, refused, failed).
    pub reviews: MetricFamily<3, Counter>,
    /// Connections to the webhooks that were closed early, by `reason`: `limit` if the client had its share, `evicted` if
    /// another client got the slot.
    pub webhook_connections_closed: MetricFamily<1, Counter>,
    /// When the certificate of the webhooks expires, in seconds since 1970.
    pub certificate_expiration: Gauge,
    /// Lists and watches that failed, by `kind`.
    pub watch_errors: MetricFamily<1, Counter>,
    /// When the API server last answered or sent something about a watched `kind`, in seconds since 1970.
    pub watch_contact: MetricFamily<1, Gauge<f64, AtomicU64>>,
    /// Size of the stored objects of a `kind` as the API server sent them.
    pub watch_bytes: MetricFamily<1, Gauge>,
    /// Whether a `check` of `/readyz` passes: 1 or 0.
    pub readiness_checks: MetricFamily<1, Gauge>,
    /// Panics that ended one request or one reconcile, by `task`.
    pub panics: MetricFamily<1, Counter>,
    /// Spans of traces by `result`: `sent`, or `dropped` if the collector did not take them or they came too fast.
    pub trace_spans: MetricFamily<1, Counter>,
    /// Whether the API server refuses this daemon's writes about other nodes, by `kind`: 1, otherwise 0.
    pub daemon_fenced: MetricFamily<1, Gauge>,
    /// Events that were not written because the queue was full or the API server refused them.
    pub events_dropped: Counter,
    /// Events that were not written because their object had many in a short time.
    pub events_held_back: Counter,
    /// Calls to the container runtime by `method` and `result`, in seconds.
    pub cri_calls: Durations<2>,
    /// Calls of credential provider plugins by `plugin` and `result` (succeeded, failed), in seconds.
    pub credential_plugins: Durations<2>,
    /// Image pulls from their start to their end by `result`, in seconds.
    pub image_pulls: Durations<1>,
    /// Image tags that wait for a free slot.
    pub image_pull_queue: Gauge,
    /// Image tags that are being pulled.
    pub image_pull_active: Gauge,
    /// Container recreate requests from their first observation to their completion by `result`, in seconds.
    pub recreates: Durations<1>,
    /// Container recreate requests in progress.
    pub recreate_active: Gauge,
    /// Containers that were restarted for a changed environment, by `result` (`ok` or an error category).
    pub environment_restarts: MetricFamily<1, Counter>,
    /// Images that are pinned for a time.
    pub pinned_images: Gauge,
    /// Probes that are due and wait for a slot.
    pub pod_probe_queue: Gauge,
    /// Probes by `handler` (exec, http_get, tcp_socket, grpc) and `result` (succeeded, failed, error).
    pub pod_probes: MetricFamily<2, Counter>,
    /// Reconciles of a CloneSet by `result`: `idle` if there was nothing to do, `acted`, or an error category.
    pub cloneset_passes: Durations<1>,
    /// Actions on CloneSets by `act` and `result` (`ok` or an error category).
    pub cloneset_acts: MetricFamily<2, Counter>,
    /// Containers whose restart was requested because their liveness probe failed.
    pub liveness_restarts: Counter,
    /// Containers whose liveness probe failed and whose restart waits for other Pods of the workload.
    pub liveness_restarts_waiting: Gauge,
}

static METRICS: OnceLock<Metrics> = OnceLock::new();

/// Chooses the metrics that are exposed. Call it before anything is counted; later calls have no effect.
pub fn init(program: Program) {
    // Already set: a second program in one process, as in tests.
    let _ = METRICS.set(Metrics::new(Some(program)));
}

/// The process's metrics; those of all programs if [`init`] was not called.
#[must_use]
pub fn metrics() -> &'static Metrics {
    METRICS.get_or_init(|| Metrics::new(None))
}

fn call_seconds() -> Histogram {
    Histogram::new([0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0])
}

fn work_seconds() -> Histogram {
    Histogram::new([0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0])
}

impl Metrics {
    fn new(program: Option<Program>) -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            leader: MetricFamily::new(["name"]),
            queue_depth: MetricFamily::new(["name"]),
            queue_retries: MetricFamily::new(["name"]),
            api_writes: MetricFamily::new(["kind", "verb", "result"]),
            reviews: MetricFamily::new(["kind", "step", "result"]),
            webhook_connections_closed: MetricFamily::new(["reason"]),
            certificate_expiration: Gauge::default(),
            watch_errors: MetricFamily::new(["kind"]),
            watch_contact: MetricFamily::new(["kind"]),
            watch_bytes: MetricFamily::new(["kind"]),
            readiness_checks: MetricFamily::new(["check"]),
            panics: MetricFamily::new(["task"]),
            trace_spans: MetricFamily::new(["result"]),
            daemon_fenced: MetricFamily::new(["kind"]),
            events_dropped: Counter::default(),
            events_held_back: Counter::default(),
            cri_calls: MetricFamily::new_with_constructor(["method", "result"], call_seconds),
            credential_plugins: MetricFamily::new_with_constructor(["plugin", "result"], work_seconds),
            image_pulls: MetricFamily::new_with_constructor(["result"], work_seconds),
            image_pull_queue: Gauge::default(),
            image_pull_active: Gauge::default(),
            recreates: MetricFamily::new_with_constructor(["result"], work_seconds),
            recreate_active: Gauge::default(),
            environment_restarts: MetricFamily::new(["result"]),
            pinned_images: Gauge::default(),
            pod_probe_queue: Gauge::default(),
            pod_probes: MetricFamily::new(["handler", "result"]),
            cloneset_passes: MetricFamily::new_with_constructor(["result"], call_seconds),
            cloneset_acts: MetricFamily::new(["act", "result"]),
            liveness_restarts: Counter::default(),
            liveness_restarts_waiting: Gauge::default(),
        };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessCollector));
        metrics.register_queues(&mut registry);
        let ours = registry.sub_registry_with_prefix("kruise");
        metrics.register_shared(ours);
        if program != Some(Program::Manager) {
            metrics.register_daemon(ours);
        }
        if program != Some(Program::Daemon) {
            metrics.register_manager(ours);
            registry.register(
                "leader_election_master_status",
                "Whether this process holds the Lease",
                metrics.leader.series.clone(),
            );
        }
        metrics.registry = registry;
        metrics
    }

    fn register_queues(&self, r: &mut Registry) {
        r.register(
            "workqueue_depth",
            "Objects that wait for a free worker of their controller",
            self.queue_depth.series.clone(),
        );
        r.register(
            "workqueue_retries",
            "Reconciles that failed and are retried",
            self.queue_retries.series.clone(),
        );
    }

    fn register_shared(&self, r: &mut Registry) {
        let build = Info::new(vec![("version", super::VERSION), ("commit", super::COMMIT)]);
        r.register("build", "The version of this program", build);
        r.register(
            "api_writes",
            "Writes to the API server",
            self.api_writes.series.clone(),
        );
        r.register(
            "watch_errors",
            "Lists and watches that failed",
            self.watch_errors.series.clone(),
        );
        r.register_with_unit(
            "watch_last_contact_timestamp",
            "When the API server last answered or sent something about a watched kind",
            Unit::Seconds,
            self.watch_contact.series.clone(),
        );
        r.register_with_unit(
            "watch",
            "Length of the objects of a kind that are held in memory, as the API server sent them",
            Unit::Bytes,
            self.watch_bytes.series.clone(),
        );
        r.register(
            "readiness_check",
            "Whether a check of /readyz passes",
            self.readiness_checks.series.clone(),
        );
        r.register(
            "panics",
            "Panics that ended one request or one reconcile",
            self.panics.series.clone(),
        );
        r.register(
            "trace_spans",
            "Spans of traces, by what became of them",
            self.trace_spans.series.clone(),
        );
        r.register(
            "events_dropped",
            "Events that were not written because the queue was full or the API server refused",
            self.events_dropped.clone(),
        );
        r.register(
            "events_held_back",
            "Events that were not written because their object had many in a short time",
            self.events_held_back.clone(),
        );
    }

    fn register_daemon(&self, r: &mut Registry) {
        // A counter that appears with its first failure shows no increase for it.
        for ended in [&self.image_pulls, &self.recreates] {
            for result in ["succeeded", "failed"] {
                ended.create(result);
            }
        }
        r.register(
            "daemon_fenced",
            "Whether writes about other nodes are refused",
            self.daemon_fenced.series.clone(),
        );
        r.register_with_unit(
            "cri_call",
            "Calls to the container runtime",
            Unit::Seconds,
            self.cri_calls.series.clone(),
        );
        r.register_with_unit(
            "credential_plugin",
            "Calls of credential provider plugins",
            Unit::Seconds,
            self.credential_plugins.series.clone(),
        );
        r.register_with_unit(
            "image_pull",
            "Duration of image pulls, without the time in the queue",
            Unit::Seconds,
            self.image_pulls.series.clone(),
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
            self.recreates.series.clone(),
        );
        let active = self.recreate_active.clone();
        r.register("recreate_active", "ContainerRecreateRequests in progress", active);
        let restarts = self.environment_restarts.series.clone();
        r.register("environment_restarts", "Restarts for the environment", restarts);
        let pinned = self.pinned_images.clone();
        r.register("pinned_images", "Images that are pinned for a time", pinned);
        r.register(
            "pod_probe_queue",
            "Probes of NodePodProbes that wait for a slot",
            self.pod_probe_queue.clone(),
        );
        r.register(
            "pod_probes",
            "Probes of NodePodProbes",
            self.pod_probes.series.clone(),
        );
    }

    fn register_manager(&self, r: &mut Registry) {
        // A counter that appears with its first failure shows no increase for it.
        for (kind, steps) in REVIEW_STEPS {
            for step in *steps {
                let labels = [("kind", *kind), ("step", *step), ("result", "failed")];
                let labels = labels.map(|(label, value)| (label, value.to_owned()));
                drop(self.reviews.get_or_create(&labels));
            }
        }
        r.register(
            "reviews",
            "Answers to admission and conversion reviews",
            self.reviews.series.clone(),
        );
        r.register(
            "webhook_connections_closed",
            "Connections to the webhooks that were closed early",
            self.webhook_connections_closed.series.clone(),
        );
        r.register_with_unit(
            "certificate_expiration_timestamp",
            "When the certificate of the webhooks expires",
            Unit::Seconds,
            self.certificate_expiration.clone(),
        );
        let passes = self.cloneset_passes.series.clone();
        r.register_with_unit("cloneset_pass", "Reconciles of a CloneSet", Unit::Seconds, passes);
        r.register(
            "cloneset_acts",
            "Actions on CloneSets",
            self.cloneset_acts.series.clone(),
        );
        r.register(
            "liveness_restarts",
            "Requested restarts of containers whose liveness probe failed",
            self.liveness_restarts.clone(),
        );
        r.register(
            "liveness_restarts_waiting",
            "Containers whose liveness probe failed and whose restart waits for other Pods of the workload",
            self.liveness_restarts_waiting.clone(),
        );
    }

    /// Counts a call to the container runtime.
    pub fn cri_call(&self, method: &'static str, result: &'static str, elapsed: Duration) {
        let labels = [("method", method.to_owned()), ("result", result.to_owned())];
        self.cri_calls
            .get_or_create(&labels)
            .observe(elapsed.as_secs_f64());
    }

    /// All metrics of `program` as text, each with at least one series: their names and labels.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn sample(program: Program) -> String {
        let metrics = Self::new(Some(program));
        let Self {
            registry: _,
            leader,
            queue_depth,
            queue_retries,
            api_writes,
            reviews,
            webhook_connections_closed,
            watch_errors,
            watch_contact,
            watch_bytes,
            readiness_checks,
            panics,
            trace_spans,
            daemon_fenced,
            cri_calls,
            credential_plugins,
            image_pulls,
            recreates,
            environment_restarts,
            pod_probes,
            cloneset_passes,
            cloneset_acts,
            certificate_expiration: _,
            events_dropped: _,
            events_held_back: _,
            image_pull_queue: _,
            image_pull_active: _,
            recreate_active: _,
            pinned_images: _,
            pod_probe_queue: _,
            liveness_restarts: _,
            liveness_restarts_waiting: _,
        } = &metrics;
        leader.create("x");
        queue_depth.create("x");
        queue_retries.create("x");
        api_writes.create("x");
        reviews.create("x");
        webhook_connections_closed.create("x");
        watch_errors.create("x");
        watch_contact.create("x");
        watch_bytes.create("x");
        readiness_checks.create("x");
        panics.create("x");
        trace_spans.create("x");
        daemon_fenced.create("x");
        cri_calls.create("x");
        credential_plugins.create("x");
        image_pulls.create("x");
        recreates.create("x");
        environment_restarts.create("x");
        pod_probes.create("x");
        cloneset_passes.create("x");
        cloneset_acts.create("x");
        metrics.render()
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

    /// The names of the metrics that a program exposes.
    fn names(program: Program) -> Vec<String> {
        let text = Metrics::sample(program);
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        types
            .filter_map(|line| line.split(' ').next())
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn programs_expose_only_their_own_metrics() {
        let (daemon, manager) = (names(Program::Daemon), names(Program::Manager));
        let contains = |names: &[String], name: &str| names.iter().any(|n| n == name);
        for both in [
            "kruise_build",
            "kruise_watch_errors",
            "workqueue_depth",
            "process_cpu_seconds",
            "process_resident_memory_bytes",
            "process_start_time_seconds",
            "process_open_fds",
            "process_max_fds",
        ] {
            assert!(
                contains(&daemon, both) && contains(&manager, both),
                "{both}: {daemon:?} {manager:?}"
            );
        }
        for (name, on_daemon) in [
            ("kruise_cri_call_seconds", true),
            ("kruise_image_pull_active", true),
            ("kruise_recreate_seconds", true),
            ("kruise_reviews", false),
            ("kruise_cloneset_pass_seconds", false),
            ("leader_election_master_status", false),
        ] {
            assert_eq!(
                (contains(&daemon, name), contains(&manager, name)),
                (on_daemon, !on_daemon),
                "{name}"
            );
        }
    }

    #[test]
    fn rendered_metrics_match_the_documentation() {
        metrics().cri_call("PullImage", "ok", Duration::from_millis(20));
        let labels = [("name", "cloneset".to_owned())];
        metrics().leader.get_or_create(&labels).set(1);
        metrics().queue_retries.get_or_create(&labels).inc();
        let text = metrics().render();
        for want in [
            "kruise_build_info{version=",
            "kruise_cri_call_seconds_count{method=\"PullImage\",result=\"ok\"}",
            "kruise_image_pull_queue 0",
            "leader_election_master_status{name=\"cloneset\"} 1",
            "workqueue_retries_total{name=\"cloneset\"} 1",
            "process_cpu_seconds_total ",
        ] {
            assert!(text.contains(want), "{want} is not in:\n{text}");
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
