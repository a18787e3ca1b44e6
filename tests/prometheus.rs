//! The programs' metrics, as Prometheus scrapes them with the configuration in `deploy/observability`.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use support::binaries;
use testbed::cluster::prometheus::{Prometheus, dashboard_queries};
use testbed::cluster::{Component, ControlPlane, TokenBinding, wait};
use testbed::port;

const NAMESPACE: &str = "kruise-system";
/// How long Prometheus may take for what it does each second.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Address of all Pods: the programs run as processes, each with its own ports.
const POD_IP: &str = "127.0.0.1";
/// Port of the daemon's metrics in `deploy/observability`.
const DAEMON_PORT: &str = "10222";
/// The programs, which are also the accounts and the jobs.
const NAMES: [&str; 3] = ["kruise-daemon", "kruise-manager", "kruise-webhook"];

/// A program, and the port of its metrics.
struct Program {
    name: &'static str,
    manifest: &'static str,
    port: u16,
    process: Component,
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn yaml(path: &str) -> Value {
    serde_yaml::from_str(&fs::read_to_string(repository(path)).unwrap()).unwrap()
}

fn apply(plane: &ControlPlane, path: &str) {
    let path = repository(path);
    let flag = if path.is_dir() { "-k" } else { "-f" };
    plane
        .kubectl(&["apply", flag, &path.display().to_string()])
        .unwrap();
}

fn start_programs(plane: &ControlPlane) -> [Program; 3] {
    NAMES.map(|name| {
        let [port, health] = [port::reserve().unwrap(), port::reserve().unwrap()];
        let health_flag = |flag: &str| format!("--{flag}={POD_IP}:{health}");
        let (manifest, binary, flags) = match name {
            "kruise-daemon" => (
                "deploy/daemon/daemonset.yaml",
                binaries::daemon(),
                vec![
                    health_flag("addr"),
                    format!("--control-socket={}", plane.dir().join("control.sock").display()),
                ],
            ),
            "kruise-manager" => (
                "deploy/manager/deployment.yaml",
                binaries::manager(),
                vec![health_flag("health-probe-addr"), "--role=controllers".into()],
            ),
            _ => (
                "deploy/manager/webhook.yaml",
                binaries::manager(),
                vec![health_flag("health-probe-addr"), "--role=webhooks".into()],
            ),
        };
        let kubeconfig = plane
            .kubeconfig_for(NAMESPACE, name, TokenBinding::Unbound)
            .unwrap();
        let mut process = plane
            .component(name, binary)
            .args(flags)
            .args([
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--secure-metrics-addr={POD_IP}:{port}"),
            ])
            .env("POD_NAMESPACE", NAMESPACE)
            .env("NODE_NAME", "node-1")
            .env("WEBHOOK_HOST", POD_IP)
            .env("WEBHOOK_PORT", port::reserve().unwrap().to_string());
        if name != "kruise-daemon" {
            process = process.args(["--metrics-addr=0"]);
        }
        process.start().unwrap();
        Program {
            name,
            manifest,
            port,
            process,
        }
    })
}

/// What Prometheus' discovery finds of a Pod: a target for each port of each container.
fn discovered_targets(programs: &[Program]) -> Value {
    let targets = programs.iter().flat_map(|program| {
        let template = yaml(program.manifest)["spec"]["template"].clone();
        let labels = json!({
            "__meta_kubernetes_namespace": NAMESPACE,
            "__meta_kubernetes_pod_ip": POD_IP,
            "__meta_kubernetes_pod_label_control_plane": template["metadata"]["labels"]["control-plane"],
            "__meta_kubernetes_pod_name": program.name,
            "__meta_kubernetes_pod_node_name": "node-1",
        });
        let containers = template["spec"]["containers"].as_array().unwrap().clone();
        containers.into_iter().flat_map(move |container| {
            let mut labels = labels.clone();
            labels["__meta_kubernetes_pod_container_name"] = container["name"].clone();
            let Some(ports) = container["ports"].as_array() else {
                return vec![json!({ "targets": [POD_IP], "labels": labels })];
            };
            let target = |port: &Value| {
                let mut labels = labels.clone();
                labels["__meta_kubernetes_pod_container_port_name"] = port["name"].clone();
                let number = if port["name"] == "metrics" {
                    program.port.to_string()
                } else {
                    port["containerPort"].to_string()
                };
                json!({ "targets": [format!("{POD_IP}:{number}")], "labels": labels })
            };
            ports.iter().map(target).collect()
        })
    });
    targets.collect()
}

/// File with a token of a new account.
fn token_file(plane: &ControlPlane, account: &str) -> PathBuf {
    let create = ["create", "serviceaccount", account, "--namespace=default"];
    plane.kubectl(&create).unwrap();
    let path = plane.dir().join(format!("{account}.token"));
    fs::write(
        &path,
        plane.token("default", account, TokenBinding::Unbound).unwrap(),
    )
    .unwrap();
    path
}

/// What binds the roles of `deploy/observability` to an account.
fn bind_roles(plane: &ControlPlane, account: &str) {
    let account = format!("--serviceaccount=default:{account}");
    for binding in [
        [
            "clusterrolebinding",
            "reader",
            "--clusterrole=kruise-metrics-reader",
            "--namespace=default",
        ],
        [
            "rolebinding",
            "discovery",
            "--role=kruise-metrics-discovery",
            "--namespace=kruise-system",
        ],
    ] {
        plane
            .kubectl(&[&["create"], &binding[..], &[&account]].concat())
            .unwrap();
    }
}

/// The scrape configuration for a Prometheus that is no Pod and reads from a file what it would discover: Debian's has no
/// discovery in Kubernetes. Other jobs for the daemon are added: one without a token, and one with the token of an
/// account that may do nothing.
fn configuration(plane: &ControlPlane, programs: &[Program], token: &Path, other_token: &Path) -> Value {
    let targets = plane.dir().join("targets.json");
    fs::write(&targets, discovered_targets(programs).to_string()).unwrap();
    let scrape = fs::read_to_string(repository("deploy/observability/scrape.yaml")).unwrap();
    let daemon = programs
        .iter()
        .find(|program| program.name == "kruise-daemon")
        .unwrap();
    let scrape = scrape.replace(DAEMON_PORT, &daemon.port.to_string());
    let mut scrape: Value = serde_yaml::from_str(&scrape).unwrap();
    let jobs = scrape["scrape_configs"].as_array_mut().unwrap();
    for job in jobs.iter_mut() {
        job["authorization"] = json!({ "credentials_file": token });
        job.as_object_mut()
            .unwrap()
            .remove("kubernetes_sd_configs")
            .unwrap();
        job["file_sd_configs"] = json!([{ "files": [targets] }]);
    }
    let mut anonymous = jobs[0].clone();
    anonymous["job_name"] = json!("anonymous");
    anonymous.as_object_mut().unwrap().remove("authorization");
    let mut other = jobs[0].clone();
    other["job_name"] = json!("other-account");
    other["authorization"] = json!({ "credentials_file": other_token });
    jobs.extend([anonymous, other]);
    scrape["global"] =
        json!({ "scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s" });
    scrape["rule_files"] = json!([repository("deploy/observability/alerts.yaml")]);
    scrape
}

/// Waits until each of these jobs has one target, whose last error has the text beside it; none is no error.
fn wait_for_targets(prometheus: &Prometheus, programs: &[Program], expected: &[(&str, &str)]) {
    let mut last = Value::Null;
    let outcome = wait::until("the scraped targets", TIMEOUT, || {
        last = prometheus.api("targets?state=active")?["activeTargets"].take();
        let targets = last.as_array().unwrap();
        let is_expected = |(job, error): &(&str, &str)| {
            let mut of_job = targets.iter().filter(|target| target["labels"]["job"] == *job);
            let last_error = of_job.next()?["lastError"].as_str()?;
            let matches = last_error.contains(error) && last_error.is_empty() == error.is_empty();
            (matches && of_job.next().is_none()).then_some(())
        };
        Ok(expected
            .iter()
            .all(|one| is_expected(one).is_some())
            .then_some(()))
    });
    outcome.unwrap_or_else(|why| {
        let logs: Vec<String> = programs.iter().map(|program| program.process.tail()).collect();
        panic!("{why}: {last:#}\n{}", logs.join("\n"))
    });
}

#[test]
fn prometheus_scrapes_all_programs_with_its_token_alone() {
    let plane = ControlPlane::start().unwrap();
    for part in ["default/namespaces.yaml", "crds", "rbac", "webhooks"] {
        apply(&plane, &format!("deploy/{part}"));
    }
    let programs = start_programs(&plane);
    let (token, other_token) = (token_file(&plane, "prometheus"), token_file(&plane, "other"));
    // Without the roles of `deploy/observability`.
    let prometheus =
        Prometheus::start(&plane, &configuration(&plane, &programs, &token, &other_token)).unwrap();
    let unavailable = "503 Service Unavailable";
    let rejected = [("anonymous", "401 Unauthorized"), ("other-account", unavailable)];
    wait_for_targets(&prometheus, &programs, &rejected);
    wait_for_targets(&prometheus, &programs, &NAMES.map(|name| (name, unavailable)));

    apply(&plane, "deploy/observability/rbac.yaml");
    let forbidden = "403 Forbidden";
    wait_for_targets(&prometheus, &programs, &NAMES.map(|name| (name, forbidden)));
    bind_roles(&plane, "prometheus");
    let user = "--as=system:serviceaccount:default:prometheus";
    for verb in ["get", "list", "watch"] {
        // It fails if the answer is no.
        plane
            .kubectl(&["auth", "can-i", verb, "pods", "--namespace", NAMESPACE, user])
            .unwrap();
    }
    let rejected = [("anonymous", "401 Unauthorized"), ("other-account", forbidden)];
    wait_for_targets(&prometheus, &programs, &rejected);
    wait_for_targets(&prometheus, &programs, &NAMES.map(|name| (name, "")));

    // Prometheus may show a scrape before its samples.
    wait::until("the series of all programs", TIMEOUT, || {
        let info = prometheus.query("kruise_build_info")?;
        let info = info.as_array().unwrap();
        let has = |name: &str| {
            let expected = [
                ("job", name),
                ("pod", name),
                ("namespace", NAMESPACE),
                ("node", "node-1"),
            ];
            info.iter().any(|one| {
                expected
                    .iter()
                    .all(|(label, value)| one["metric"][label] == *value)
            })
        };
        Ok((NAMES.into_iter().all(has) && info.len() == NAMES.len()).then_some(()))
    })
    .unwrap();
    check_rules(&prometheus);
    check_dashboard(&prometheus);
    drop((prometheus, programs));
}

/// Prometheus evaluates each alert without an error.
fn check_rules(prometheus: &Prometheus) {
    let expected: usize = yaml("deploy/observability/alerts.yaml")["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|group| group["rules"].as_array().unwrap().len())
        .sum();
    let mut last = Value::Null;
    let outcome = wait::until("the evaluated rules", TIMEOUT, || {
        last = prometheus.api("rules")?["groups"].take();
        let groups = last.as_array().unwrap().iter();
        let rules: Vec<&Value> = groups
            .flat_map(|group| group["rules"].as_array().unwrap())
            .collect();
        let all_ok = rules.iter().all(|rule| rule["health"] == "ok");
        Ok((rules.len() == expected && all_ok).then_some(()))
    });
    outcome.unwrap_or_else(|why| panic!("{why}: {last:#}"));
}

/// Prometheus answers each query of the dashboard, and those about every process get series.
fn check_dashboard(prometheus: &Prometheus) {
    let dashboard = fs::read_to_string(repository("deploy/observability/dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let queries = dashboard_queries(&dashboard, "1m").unwrap();
    assert!(queries.len() > 20, "{queries:?}");
    let mut with_series = 0;
    let outcome = wait::until("series for the panels", TIMEOUT, || {
        let results = queries.iter().map(|query| prometheus.query(&query.expr));
        let results: Vec<Value> = results.collect::<anyhow::Result<_>>()?;
        let has_series = |result: &Value| result.as_array().is_some_and(|series| !series.is_empty());
        with_series = results.iter().filter(|result| has_series(result)).count();
        Ok((with_series > queries.len() / 3).then_some(()))
    });
    outcome.unwrap_or_else(|why| panic!("{why}: {with_series} of {} queries", queries.len()));
}
