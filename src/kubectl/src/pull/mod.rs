//! `kubectl kruise pull`: an ImagePullJob, followed to its end.
//!
//! In:  the image and which nodes; the job's status, and NodeImages for the causes of failures.
//! Out: a new ImagePullJob, a bar or lines on standard error, failed nodes with their causes on standard output.

pub mod plan;

use std::io::IsTerminal;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use indicatif::{ProgressBar, ProgressStyle};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kruise_api::text::printable;
use kruise_cluster::write;
use kube::{Api, ResourceExt};

use super::arguments;
use super::client::{Connection, create, follow, get};
use super::error::Error;
use super::output::{print_line, print_note};
use super::signals::interrupted;
use plan::{Progress, Request};

/// Failed nodes whose causes are read.
const MAX_CAUSES: usize = 100;
/// Causes that are read at a time.
const CAUSES_AT_ONCE: usize = 8;

/// Options of `pull`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    #[arg(help = "The image: NAME[:TAG][@DIGEST]", value_name = "IMAGE", value_parser = arguments::image,
        required_unless_present = "retry")]
    image: Option<String>,

    /// Pulls again what this job pulls, on the nodes where it failed
    #[arg(long, value_name = "JOB", value_parser = arguments::object_name,
        conflicts_with_all = ["image", "selector", "nodes", "pull_secret", "service_account"])]
    retry: Option<String>,

    /// Only on nodes with these labels: KEY=VALUE,…
    #[arg(short = 'l', long, value_name = "LABELS", value_parser = arguments::labels, conflicts_with = "nodes")]
    selector: Option<std::collections::BTreeMap<String, String>>,

    /// Only on these nodes: NAME,…
    #[arg(long, value_name = "NODES", value_delimiter = ',', value_parser = arguments::object_name)]
    nodes: Vec<String>,

    /// How many nodes pull at a time: a number, or a percentage such as 10%; 1 when absent
    #[arg(long, value_name = "N", value_parser = arguments::parallelism)]
    parallelism: Option<IntOrString>,

    /// Secret with registry credentials, in the namespace of the job; may be repeated
    #[arg(long, value_name = "SECRET", value_parser = arguments::object_name)]
    pull_secret: Vec<String>,

    /// Service account whose token credential provider plugins get, in the namespace of the job
    #[arg(long, value_name = "NAME", value_parser = arguments::object_name)]
    service_account: Option<String>,

    /// How long each node keeps the image after its pull, although nothing uses it: such as 24h, up to 720h
    #[arg(long, value_name = "DURATION", value_parser = arguments::pin, conflicts_with = "retry")]
    pin: Option<i32>,

    /// Name of the job; generated when absent
    #[arg(long, value_name = "NAME", value_parser = arguments::object_name)]
    name: Option<String>,

    /// How long to wait for the end of the job, such as 10m; 0 is without limit
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = arguments::duration)]
    timeout: Duration,

    /// Whether to wait for the end of the job
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        action = clap::ArgAction::Set)]
    wait: bool,
}

/// Creates the job and follows it.
pub async fn run(connection: &Connection, options: Options) -> Result<(), Error> {
    run_until(connection, options, interrupted()).await
}

async fn run_until(
    connection: &Connection,
    options: Options,
    interrupt: impl Future<Output = ()>,
) -> Result<(), Error> {
    let Options {
        image,
        retry,
        selector,
        nodes,
        parallelism,
        pull_secret,
        service_account,
        pin,
        name,
        timeout,
        wait,
    } = options;
    let jobs: Api<ImagePullJob> = connection.api();
    let mut planned = if let Some(failed) = retry {
        let job = get(&jobs, &failed).await?;
        let Some(planned) = plan::retry(&job, parallelism) else {
            return nothing_to_retry(&job);
        };
        planned
    } else {
        plan::job(&Request {
            image: image.unwrap_or_default(),
            labels: selector.unwrap_or_default(),
            nodes,
            parallelism,
            pull_secrets: pull_secret,
            service_account,
            pin_seconds: pin,
        })
    };
    planned.metadata.namespace = Some(connection.namespace.clone());
    if name.is_some() {
        (planned.metadata.name, planned.metadata.generate_name) = (name, None);
    }
    let job = create(&jobs, &planned).await?;
    print_line(&format!("imagepulljob.apps.kruise.io/{} created", job.name_any()));
    if !wait {
        return Ok(());
    }
    let mut interrupt = pin!(interrupt);
    let end = follow_job(connection, &jobs, &job, timeout, interrupt.as_mut()).await?;
    // A signal that is handled once does not end the process by itself any more.
    tokio::select! {
        reported = report(connection, &job, &end) => reported,
        () = interrupt => Err(Error::Interrupted("interrupted; the job has ended".to_owned())),
    }
}

/// The job names no failed node: it has succeeded, has not got that far, or failed for another reason.
fn nothing_to_retry(job: &ImagePullJob) -> Result<(), Error> {
    let (name, progress) = (job.name_any(), plan::progress(job));
    if progress.is_complete() {
        print_line(&format!(
            "imagepulljob.apps.kruise.io/{name} failed on no node; nothing was created"
        ));
        return Ok(());
    }
    let mut message = format!("imagepulljob.apps.kruise.io/{name} names no failed node; nothing was created");
    if let Some(failure) = &progress.failure {
        message += &format!(": {}", printable(failure));
    }
    Err(Error::Failed(message))
}

/// Follows the job to its end.
async fn follow_job(
    connection: &Connection,
    jobs: &Api<ImagePullJob>,
    job: &ImagePullJob,
    limit: Duration,
    interrupt: Pin<&mut impl Future<Output = ()>>,
) -> Result<Progress, Error> {
    let (name, uid) = (job.name_any(), job.uid().unwrap_or_default());
    let mut view = ProgressView::new();
    let bar = view.bar.clone();
    let note = |line: &str| match &bar {
        Some(bar) => bar.suspend(|| print_note(line)),
        None => print_note(line),
    };
    let following = follow(jobs, &name, &uid, note, |job| {
        let progress = plan::progress(job);
        view.show(&progress);
        progress.ended.then_some(progress)
    });
    let result = tokio::select! {
        ended = following => ended.map_err(|error| error.with_hint(|| job_goes_on(connection, job))),
        () = interrupt => Err(Error::Interrupted(format!("interrupted; {}", job_goes_on(connection, job)))),
        () = sleep_unless_zero(limit) => Err(Error::TimedOut(format!(
            "timed out after {limit:?}; {}", job_goes_on(connection, job)
        ))),
    };
    view.clear();
    result
}

/// Sleeps; for ever if the time is zero.
pub async fn sleep_unless_zero(limit: Duration) {
    if limit.is_zero() {
        return std::future::pending().await;
    }
    tokio::time::sleep(limit).await;
}

fn job_goes_on(connection: &Connection, job: &ImagePullJob) -> String {
    let (name, namespace) = (job.name_any(), job.namespace().unwrap_or_default());
    let options = printable(&connection.cluster_options);
    format!(
        "the job continues. To follow it:\n  kubectl get imagepulljob {name} -n {namespace}{options} -w\n\
         To stop it:\n  kubectl delete imagepulljob {name} -n {namespace}{options}"
    )
}

/// Prints the result, with the cause of each failure.
async fn report(connection: &Connection, job: &ImagePullJob, end: &Progress) -> Result<(), Error> {
    let image = &job.spec.image;
    if let Some(why) = plan::missing_nodes(job, end) {
        return Err(Error::Failed(why));
    }
    if end.is_complete() {
        let line = match end.desired {
            0 => "no node matches; nothing was pulled".to_owned(),
            count => format!("{image} is on {count} node(s)"),
        };
        print_line(&line);
        return Ok(());
    }
    let images = &Api::<NodeImage>::all(connection.client.clone());
    let causes = stream::iter(end.failed_nodes.iter().take(MAX_CAUSES)).map(|node| async move {
        let found = write::get(images, node).await;
        match found {
            Ok(found) => found.and_then(|found| plan::cause(&found, image)),
            Err(error) => Some(format!(
                "its NodeImage cannot be read: {}",
                Error::from(error).text()
            )),
        }
    });
    let causes: Vec<Option<String>> = causes.buffered(CAUSES_AT_ONCE).collect().await;
    let without_cause = std::iter::repeat(None);
    for (node, cause) in end
        .failed_nodes
        .iter()
        .zip(causes.into_iter().chain(without_cause))
    {
        let cause = cause.unwrap_or_else(|| "the cause is not known".to_owned());
        print_line(&format!("node {node}: {cause}"));
    }
    let mut message = format!(
        "{image} could not be pulled on {} of {} node(s)",
        end.failed, end.desired
    );
    if let Some(failure) = end.failure.as_ref().filter(|_| end.failed_nodes.is_empty()) {
        message += &format!(": {}", printable(failure));
    }
    if !end.failed_nodes.is_empty() {
        let (name, namespace) = (job.name_any(), &connection.namespace);
        let options = printable(&connection.cluster_options);
        let hint = end.retry_hint();
        message += &format!(". {hint}:\n  kubectl kruise pull --retry {name} -n {namespace}{options}");
    }
    Err(Error::Failed(message))
}

/// A bar on a terminal, lines elsewhere; both on standard error.
struct ProgressView {
    bar: Option<ProgressBar>,
    last: Option<Progress>,
}

impl ProgressView {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let style =
                ProgressStyle::with_template("{spinner} [{bar:30}] {pos}/{len} nodes  {elapsed}  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, last: None }
    }

    fn show(&mut self, progress: &Progress) {
        if let Some(bar) = &self.bar {
            bar.set_length(u64::try_from(progress.desired).unwrap_or_default());
            bar.set_position(u64::try_from(progress.finished()).unwrap_or_default());
            bar.set_message(printable(&bar_message(progress)));
        } else if progress.is_news_after(self.last.as_ref()) {
            print_note(&progress.line());
            self.last = Some(progress.clone());
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar_message(progress: &Progress) -> String {
    if !progress.started {
        return progress.line();
    }
    let mut parts = vec![format!("{} pulling", progress.active)];
    if progress.failed > 0 {
        parts.push(format!("{} failed", progress.failed));
    }
    if !progress.waiting.is_empty() {
        parts.push(progress.waiting.clone());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake_server::{self, SILENT, failure};

    #[derive(clap::Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn options() -> Options {
        Options {
            image: Some("nginx:1".to_owned()),
            retry: None,
            selector: None,
            nodes: Vec::new(),
            parallelism: None,
            pull_secret: Vec::new(),
            service_account: None,
            pin: None,
            name: None,
            timeout: Duration::ZERO,
            wait: true,
        }
    }

    /// A job that has failed on a node.
    fn failed_job() -> Value {
        json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
            "metadata": { "name": "job", "namespace": "n", "uid": "u" },
            "spec": { "image": "nginx:1", "completionPolicy": {} },
            "status": { "desired": 1, "failed": 1, "failedNodes": ["node-1"], "completionTime": "2026-01-01T00:00:00Z" } })
    }

    #[test]
    fn retry_has_the_credentials_of_its_job() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["pull"][..], args].concat());
        let named = parse(&["nginx:1", "--service-account", "app"]).unwrap();
        assert_eq!(named.options.service_account.as_deref(), Some("app"));
        assert!(parse(&["nginx:1", "--service-account", "a/b"]).is_err());
        assert!(parse(&["--retry", "job"]).is_ok());
        for credentials in ["--service-account", "--pull-secret"] {
            assert!(
                parse(&["--retry", "job", credentials, "app"]).is_err(),
                "{credentials}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn interrupt_ends_the_report_too() {
        let connection = fake_server::connection(|request| match request.path.contains("/nodeimages/") {
            true => (SILENT, Value::Null),
            false => (200, failed_job()),
        });
        let interrupt = tokio::time::sleep(Duration::from_secs(1));
        let error = run_until(&connection, options(), interrupt).await.unwrap_err();
        assert_eq!(error.text(), "interrupted; the job has ended");
        let error = run_until(&connection, options(), std::future::pending()).await;
        assert!(error.unwrap_err().text().contains("To pull again there"));
    }

    #[tokio::test(start_paused = true)]
    async fn job_that_cannot_be_followed_continues() {
        let connection = fake_server::connection(|request| match request.method.as_str() {
            "POST" => (201, failed_job()),
            _ => failure(403, "Forbidden"),
        });
        let error = run_until(&connection, options(), std::future::pending()).await;
        let text = error.unwrap_err().text();
        assert!(text.starts_with("Error from server (Forbidden): "), "{text}");
        assert!(
            text.contains("\nthe job continues. To follow it:\n  kubectl get imagepulljob job -n n -w\n"),
            "{text}"
        );
    }
}
