//! A picture of the dashboard: Prometheus scrapes the programs during the demo, and Chromium draws what it has.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{PULLED_IMAGE, repository_path};
use testbed::cluster::prepare::{self, Part};
use testbed::cluster::prometheus::{Prometheus, dashboard_queries};
use testbed::cluster::{Cache, Node, TokenBinding, run_command};

/// Draws a dashboard from the results of its queries.
const PAGE: &str = include_str!("../dashboard/page.html");
/// Where the page has its data.
const PLACEHOLDER: &str = "/*DATA*/null";
/// Pause between two scrapes, in seconds.
const SCRAPE_INTERVAL: u64 = 2;
/// How often more is done, and the pause between.
const ROUNDS: u32 = 12;
const ROUND: Duration = Duration::from_secs(15);
/// Width of the picture in pixels, as the page expects it.
const WIDTH: u64 = 1600;
/// The program, its port of `deploy/observability`, and the label of its Pods.
const PROGRAMS: [(&str, u16, &str); 3] = [
    ("kruise-daemon", 10222, "daemon"),
    ("kruise-manager", 8080, "controller-manager"),
    ("kruise-webhook", 8080, "webhook"),
];

/// A folder with a kustomization of `deploy/default` that serves metrics on the addresses of the Pods.
pub fn overlay(node: &Node) -> Result<PathBuf> {
    let folder = node.plane.dir().join("overlay");
    fs::create_dir_all(&folder)?;
    // Kustomize accepts relative paths only.
    let up = "../".repeat(folder.components().count() - 1);
    let path = |part: &str| format!("{up}{}", repository_path(part).trim_start_matches('/'));
    let kustomization = json!({
        "resources": [path("deploy/default")],
        "components": [path("deploy/observability")],
    });
    fs::write(folder.join("kustomization.yaml"), kustomization.to_string())?;
    Ok(folder)
}

/// What is scraped from now on.
pub struct Recording {
    prometheus: Prometheus,
    start: u64,
}

impl Recording {
    /// Starts Prometheus with an account of its own.
    pub fn start(node: &Node) -> Result<Self> {
        for args in [
            &["create", "serviceaccount", "prometheus", "--namespace=default"][..],
            &[
                "create",
                "clusterrolebinding",
                "prometheus",
                "--clusterrole=kruise-metrics-reader",
                "--serviceaccount=default:prometheus",
            ],
        ] {
            node.plane.kubectl(args)?;
        }
        let token = node.plane.dir().join("prometheus.token");
        fs::write(
            &token,
            node.plane.token("default", "prometheus", TokenBinding::Unbound)?,
        )?;
        let jobs = PROGRAMS
            .iter()
            .map(|(job, port, part)| {
                Ok(json!({
                    "job_name": job,
                    "scheme": "https",
                    "tls_config": { "insecure_skip_verify": true },
                    "authorization": { "credentials_file": token },
                    "static_configs": targets(node, *port, part)?,
                }))
            })
            .collect::<Result<Vec<Value>>>()?;
        let interval = format!("{SCRAPE_INTERVAL}s");
        let configuration = json!({
            "global": { "scrape_interval": interval, "scrape_timeout": interval },
            "scrape_configs": jobs,
        });
        Ok(Self {
            prometheus: Prometheus::start(&node.plane, &configuration)?,
            start: now()?,
        })
    }

    /// Goes on with small jobs and requests, until there is something to see: the demo is over within a minute.
    pub fn keep_busy(&self, node: &Node) -> Result<()> {
        for round in 0..ROUNDS {
            let name = format!("busy-{round}");
            let job = json!({
                "apiVersion": "apps.kruise.io/v1beta1",
                "kind": "ImagePullJob",
                "metadata": { "name": name, "namespace": "default" },
                "spec": {
                    "image": PULLED_IMAGE.0,
                    "imagePullPolicy": "Always",
                    "completionPolicy": { "type": "Always", "ttlSecondsAfterFinished": 60 },
                },
            });
            let request = json!({
                "apiVersion": "apps.kruise.io/v1beta1",
                "kind": "ContainerRecreateRequest",
                "metadata": { "name": name, "namespace": "default" },
                "spec": {
                    "podName": "hello",
                    "containers": [{ "name": "app" }],
                    "ttlSecondsAfterFinished": 60,
                },
            });
            node.plane.apply(&job.to_string())?;
            node.plane.apply(&request.to_string())?;
            // The third of these has an image that does not exist.
            if round == 2 {
                let mut missing = job;
                missing["metadata"]["name"] = json!("missing");
                missing["spec"]["image"] = json!("nothing:1");
                node.plane.apply(&missing.to_string())?;
            }
            thread::sleep(ROUND);
        }
        Ok(())
    }

    /// Draws the dashboard for the time since the start.
    pub fn draw(&self, file: &Path) -> Result<()> {
        prepare::ensure(&Cache::open()?, &[Part::Chromium])?;
        let dashboard = fs::read_to_string(repository_path("deploy/observability/dashboard.json"))?;
        let dashboard: Value = serde_json::from_str(&dashboard)?;
        let end = now()?;
        // As Grafana chooses it: four scrapes.
        let queries = dashboard_queries(&dashboard, format_args!("{}s", 4 * SCRAPE_INTERVAL))?;
        let results = queries
            .iter()
            .map(|query| {
                let result = self
                    .prometheus
                    .query_range(&query.expr, self.start, end, SCRAPE_INTERVAL)?;
                Ok(json!({ "panel": query.panel, "refId": query.ref_id, "result": result }))
            })
            .collect::<Result<Vec<Value>>>()?;
        let height = height(&dashboard)?;
        let data = json!({ "dashboard": dashboard, "start": self.start, "end": end, "results": results });
        screenshot(&data, height, file)
    }
}

/// The containers' addresses of a part, with the labels that the dashboard uses.
fn targets(node: &Node, port: u16, part: &str) -> Result<Value> {
    let pods: Value = serde_json::from_str(&node.plane.kubectl(&[
        "get",
        "pods",
        "--namespace=kruise-system",
        &format!("--selector=control-plane={part}"),
        "--output=json",
    ])?)?;
    let pods = pods["items"].as_array().context("kubectl printed no list")?;
    let targets = pods.iter().map(|pod| {
        let address = pod["status"]["podIP"].as_str().context("a Pod has no address")?;
        let labels = json!({
            "namespace": pod["metadata"]["namespace"],
            "pod": pod["metadata"]["name"],
            "node": pod["spec"]["nodeName"],
        });
        Ok(json!({ "targets": [format!("{address}:{port}")], "labels": labels }))
    });
    targets.collect::<Result<Vec<Value>>>().map(Value::Array)
}

fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// Height of the picture in pixels: a header, and 38 for each unit of Grafana's grid.
fn height(dashboard: &Value) -> Result<u64> {
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let ends = panels.iter().map(|panel| {
        let position = |field: &str| panel["gridPos"][field].as_u64().unwrap_or_default();
        position("y") + position("h")
    });
    Ok(72 + 38 * ends.max().unwrap_or_default())
}

fn screenshot(data: &Value, height: u64, file: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let page = folder.path().join("page.html");
    // A label must not end the script.
    let data = data.to_string().replace('<', "\\u003c");
    fs::write(&page, PAGE.replace(PLACEHOLDER, &data))?;
    let picture = folder.path().join("picture.png");
    let document = run_command(Command::new("chromium").args([
        "--headless=new".to_owned(),
        "--no-sandbox".to_owned(),
        "--disable-gpu".to_owned(),
        "--hide-scrollbars".to_owned(),
        format!("--user-data-dir={}", folder.path().join("profile").display()),
        format!("--window-size={WIDTH},{height}"),
        "--dump-dom".to_owned(),
        format!("--screenshot={}", picture.display()),
        format!("file://{}", page.display()),
    ]))?;
    let title = document.split_once("<title>").map_or("", |(_, rest)| rest);
    let title = title.split('<').next().unwrap_or_default();
    ensure!(
        title == format!("height:{height}"),
        "the page drew nothing: {title:?}"
    );
    fs::copy(&picture, file).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_takes_the_data_once() {
        assert_eq!(PAGE.matches(PLACEHOLDER).count(), 1);
    }

    #[test]
    fn picture_ends_below_the_lowest_panel() {
        let panel = |y, h| json!({ "gridPos": { "y": y, "h": h } });
        let dashboard = json!({ "panels": [panel(0, 1), panel(9, 4), panel(1, 8)] });
        assert_eq!(height(&dashboard).ok(), Some(72 + 38 * 13));
        assert!(height(&json!({})).is_err());
    }
}
