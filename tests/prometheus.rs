//! The programs' metrics, as Prometheus scrapes them with the configuration in `deploy/observability`.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use support::binaries;
use support::readiness::http_get;
use testbed::cluster::prepare::{self, Part};
use testbed::cluster::{Cache, Component, ControlPlane, TokenBinding, wait};
use testbed::port;

/// The programs, each with the address that its Pod has here, its own flags and its manifest. They run as processes.
const PROGRAMS: [(&str, &str, &[&str], &str); 3] = [
    (
        "kruise-daemon",
        "127.88.0.2",
        &[
            "--addr=127.88.0.2:10221",
            "--secure-metrics-addr=127.88.0.2:10222",
        ],
        "deploy/daemon/daemonset.yaml",
    ),
    (
        "kruise-manager",
        "127.88.0.3",
        &[
            "--role=controllers",
            "--health-probe-addr=127.88.0.3:8000",
            "--metrics-addr=0",
            "--secure-metrics-addr=127.88.0.3:8080",
        ],
        "deploy/manager/deployment.yaml",
    ),
    (
        "kruise-webhook",
        "127.88.0.4",
        &[
            "--role=webhooks",
            "--health-probe-addr=127.88.0.4:8000",
            "--metrics-addr=0",
            "--secure-metrics-addr=127.88.0.4:8080",
        ],
        "deploy/manager/webhook.yaml",
    ),
];
const NAMESPACE: &str = "kruise-system";
/// How long Prometheus may take for what it does each second.
const TIMEOUT: Duration = Duration::from_secs(120);

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

/// Starts the programs.
fn start_programs(plane: &ControlPlane) -> Vec<Component> {
    PROGRAMS
        .into_iter()
        .map(|(name, _, flags, _)| {
            let binary = if name == "kruise-daemon" {
                binaries::daemon()
            } else {
                binaries::manager()
            };
            let kubeconfig = plane
                .kubeconfig_for(NAMESPACE, name, TokenBinding::Unbound)
                .unwrap();
            let mut program = plane
                .component(name, binary)
                .args([format!("--kubeconfig={}", kubeconfig.display())])
                .args(flags.iter().copied())
                .env("POD_NAMESPACE", NAMESPACE)
                .env("NODE_NAME", "node-1")
                .env("WEBHOOK_HOST", "127.0.0.1")
                .env("WEBHOOK_PORT", port::reserve().unwrap().to_string());
            if name == "kruise-daemon" {
                let socket = plane.dir().join("control.sock");
                program = program.args([format!("--control-socket={}", socket.display())]);
            }
            program.start().unwrap();
            program
        })
        .collect()
}

/// What Prometheus' discovery finds of a Pod: a target for each port of each container.
fn discovered_targets() -> Value {
    let targets = PROGRAMS.into_iter().flat_map(|(name, address, _, manifest)| {
        let template = yaml(manifest)["spec"]["template"].clone();
        let labels = json!({
            "__meta_kubernetes_namespace": NAMESPACE,
            "__meta_kubernetes_pod_ip": address,
            "__meta_kubernetes_pod_label_control_plane": template["metadata"]["labels"]["control-plane"],
            "__meta_kubernetes_pod_name": name,
            "__meta_kubernetes_pod_node_name": "node-1",
        });
        let containers = template["spec"]["containers"].as_array().unwrap().clone();
        containers.into_iter().flat_map(move |container| {
            let mut labels = labels.clone();
            labels["__meta_kubernetes_pod_container_name"] = container["name"].clone();
            let Some(ports) = container["ports"].as_array() else {
                return vec![json!({ "targets": [address], "labels": labels })];
            };
            let target = |port: &Value| {
                let mut labels = labels.clone();
                labels["__meta_kubernetes_pod_container_port_name"] = port["name"].clone();
                json!({ "targets": [format!("{address}:{}", port["containerPort"])], "labels": labels })
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
fn configuration(plane: &ControlPlane, token: &Path, other_token: &Path) -> Value {
    let targets = plane.dir().join("targets.json");
    fs::write(&targets, discovered_targets().to_string()).unwrap();
    let mut scrape = yaml("deploy/observability/scrape.yaml");
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

fn start_prometheus(plane: &ControlPlane, configuration: &Value) -> (Component, String) {
    let cache = Cache::open().unwrap();
    prepare::ensure(&cache, &[Part::Prometheus]).unwrap();
    let file = plane.dir().join("prometheus.json");
    fs::write(&file, configuration.to_string()).unwrap();
    let address = format!("127.0.0.1:{}", port::reserve().unwrap());
    let ready = address.clone();
    let mut prometheus = plane
        .component("prometheus", cache.prometheus())
        .args([
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", plane.dir().join("tsdb").display()),
            format!("--web.listen-address={address}"),
        ])
        .ready(move || http_get(&ready, "/-/ready").contains("200 OK"));
    prometheus.start().unwrap();
    (prometheus, address)
}

/// An answer of Prometheus' API.
fn ask(address: &str, path: &str) -> Value {
    let mut stream = TcpStream::connect(address).unwrap();
    // Without HTTP/1.1 there are no chunks.
    write!(stream, "GET /api/v1/{path} HTTP/1.0\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (_, body) = response.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|why| panic!("{path}: {why}: {body}"))
}

/// The result of a query at this time.
fn query(address: &str, expr: &str) -> Value {
    let encoded: String = expr.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let answer = ask(address, &format!("query?query={encoded}"));
    assert_eq!(answer["status"], "success", "{expr}: {answer}");
    answer["data"]["result"].clone()
}

/// Waits until each of these jobs has one target, whose last error has the text beside it; none is no error.
fn wait_for_targets(address: &str, programs: &[Component], expected: &[(&str, &str)]) {
    let mut last = Value::Null;
    let outcome = wait::until("the scraped targets", TIMEOUT, || {
        last = ask(address, "targets?state=active")["data"]["activeTargets"].clone();
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
        let logs: Vec<String> = programs.iter().map(Component::tail).collect();
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
    let (prometheus, address) = start_prometheus(&plane, &configuration(&plane, &token, &other_token));
    let unavailable = "503 Service Unavailable";
    let rejected = [("anonymous", "401 Unauthorized"), ("other-account", unavailable)];
    wait_for_targets(&address, &programs, &rejected);
    wait_for_targets(
        &address,
        &programs,
        &PROGRAMS.map(|(name, ..)| (name, unavailable)),
    );

    apply(&plane, "deploy/observability/rbac.yaml");
    let forbidden = "403 Forbidden";
    wait_for_targets(&address, &programs, &PROGRAMS.map(|(name, ..)| (name, forbidden)));
    bind_roles(&plane, "prometheus");
    let user = "--as=system:serviceaccount:default:prometheus";
    for verb in ["get", "list", "watch"] {
        // It fails if the answer is no.
        plane
            .kubectl(&["auth", "can-i", verb, "pods", "--namespace", NAMESPACE, user])
            .unwrap();
    }
    let rejected = [("anonymous", "401 Unauthorized"), ("other-account", forbidden)];
    wait_for_targets(&address, &programs, &rejected);
    wait_for_targets(&address, &programs, &PROGRAMS.map(|(name, ..)| (name, "")));

    let info = query(&address, "kruise_build_info");
    let mut seen: Vec<_> = info
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["metric"])
        .collect();
    seen.sort_by_key(|labels| labels["job"].to_string());
    for (labels, (name, ..)) in seen.iter().zip(PROGRAMS) {
        for (label, value) in [
            ("job", name),
            ("pod", name),
            ("namespace", NAMESPACE),
            ("node", "node-1"),
        ] {
            assert_eq!(labels[label], value, "{labels}");
        }
    }
    assert_eq!(seen.len(), PROGRAMS.len());
    check_rules(&address);
    check_dashboard(&address);
    drop((prometheus, programs));
}

/// Prometheus evaluates each alert without an error.
fn check_rules(address: &str) {
    let expected: usize = yaml("deploy/observability/alerts.yaml")["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|group| group["rules"].as_array().unwrap().len())
        .sum();
    let mut last = Value::Null;
    let outcome = wait::until("the evaluated rules", TIMEOUT, || {
        last = ask(address, "rules")["data"]["groups"].clone();
        let groups = last.as_array().unwrap().iter();
        let rules: Vec<&Value> = groups
            .flat_map(|group| group["rules"].as_array().unwrap())
            .collect();
        let all_ok = rules.iter().all(|rule| rule["health"] == "ok");
        Ok((rules.len() == expected && all_ok).then_some(()))
    });
    outcome.unwrap_or_else(|why| panic!("{why}: {last:#}"));
}

/// Prometheus answers each query of the dashboard, and those about every process have series.
fn check_dashboard(address: &str) {
    let dashboard = fs::read_to_string(repository("deploy/observability/dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let (mut queries, mut with_series) = (0, 0);
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap();
            // The variables of the dashboard select everything.
            let expr = expr.replace("$__rate_interval", "1m");
            let mut parts = expr.split("\"$");
            let first = parts.next().unwrap().to_owned();
            let expr = parts.fold(first, |expr, part| {
                expr + "\".*\"" + part.split_once('"').unwrap().1
            });
            let result = query(address, &expr);
            queries += 1;
            with_series += usize::from(result.as_array().is_some_and(|series| !series.is_empty()));
        }
    }
    assert!(
        queries > 20 && with_series > queries / 3,
        "{with_series} of {queries}"
    );
}
