//! Alerts, dashboard and scrape configuration in `deploy/observability`, compared with the metrics that the programs
//! export, with the manifests and with the pages for operators.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use promql_parser::label::{MatchOp, Matcher};
use promql_parser::parser::value::ValueType;
use promql_parser::parser::{self, BinaryExpr, Expr, LabelModifier, VectorMatchCardinality, VectorSelector};
use serde_json::Value;

use kruise_ops::metrics::{Metrics, Program};

type Names = BTreeSet<String>;
/// Label names of each metric.
type MetricLabels = BTreeMap<String, Names>;

/// Labels that Prometheus adds to each target.
const PROMETHEUS_LABELS: [&str; 2] = ["job", "instance"];
/// The metric that Prometheus itself has of each target.
const UP: &str = "up";
/// Page with one section for each alert.
const RUNBOOKS: &str = "docs/operations/runbooks.md";

fn repo_file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(repo_file(path)).unwrap_or_else(|why| panic!("{path}: {why}"))
}

fn yaml(path: &str) -> Value {
    serde_yaml::from_str(&read(path)).unwrap()
}

fn array(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("not a list: {value}"))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a string: {value}"))
}

/// The metrics of a program, from what it renders.
fn exported(program: Program) -> MetricLabels {
    let mut metrics = MetricLabels::new();
    // Some metrics exist only in a process with an asynchronous runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _context = runtime.enter();
    let text = Metrics::sample(program);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        // No value in a sample contains a comma.
        let labels = labels.trim_end_matches('}').split(',');
        let names = labels.filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
        metrics.entry(name.to_owned()).or_default().extend(names);
    }
    assert!(metrics.len() > 20, "{metrics:?}");
    metrics
}

/// What may be queried: metrics of each job, and the labels of its targets.
struct Targets {
    jobs: BTreeMap<String, MetricLabels>,
    labels: Names,
}

impl Targets {
    fn load() -> Self {
        let scrape = yaml("deploy/observability/scrape.yaml");
        let mut jobs = BTreeMap::new();
        let mut labels: Option<Names> = None;
        for job in array(&scrape["scrape_configs"]) {
            let name = string(&job["job_name"]);
            let program = match name {
                "kruise-daemon" => Program::Daemon,
                "kruise-manager" | "kruise-webhook" => Program::Manager,
                other => panic!("unknown job {other}"),
            };
            jobs.insert(name.to_owned(), exported(program));
            let rules = array(&job["relabel_configs"]).iter();
            let of_job: Names = rules
                .filter_map(|rule| rule["target_label"].as_str())
                .filter(|label| !label.starts_with("__"))
                .map(str::to_owned)
                .collect();
            assert_eq!(*labels.get_or_insert_with(|| of_job.clone()), of_job, "{name}");
        }
        let mut labels = labels.unwrap();
        labels.extend(PROMETHEUS_LABELS.map(str::to_owned));
        Self { jobs, labels }
    }

    /// The labels of the series that `expr` results in.
    fn check(&self, expr: &Expr) -> Result<Names, String> {
        match expr {
            Expr::VectorSelector(selector) => self.check_selector(selector),
            Expr::MatrixSelector(matrix) => self.check_selector(&matrix.vs),
            Expr::Paren(paren) => self.check(&paren.expr),
            Expr::Unary(unary) => self.check(&unary.expr),
            Expr::Subquery(subquery) => self.check(&subquery.expr),
            Expr::NumberLiteral(_) | Expr::StringLiteral(_) => Ok(Names::new()),
            Expr::Aggregate(aggregate) => {
                let labels = self.check(&aggregate.expr)?;
                match (&aggregate.modifier, aggregate.op.to_string().as_str()) {
                    (None, "topk" | "bottomk") => Ok(labels),
                    (None, _) => Ok(Names::new()),
                    (Some(modifier), _) => modified(&labels, modifier),
                }
            }
            Expr::Call(call) if call.func.name == "absent" => {
                let [argument] = call.args.args.as_slice() else {
                    return Err(format!("{call:?}"));
                };
                self.check(argument)?;
                Ok(equal_matchers(argument))
            }
            Expr::Call(call) => {
                let mut labels = Names::new();
                for argument in &call.args.args {
                    labels.extend(self.check(argument)?);
                }
                if call.func.name == "histogram_quantile" && !labels.remove("le") {
                    return Err("histogram_quantile needs label le".to_owned());
                }
                Ok(labels)
            }
            Expr::Binary(binary) => self.check_binary(binary),
            Expr::Extension(_) => Err("not PromQL".to_owned()),
        }
    }

    fn check_binary(&self, binary: &BinaryExpr) -> Result<Names, String> {
        let (left, right) = (self.check(&binary.lhs)?, self.check(&binary.rhs)?);
        if let Some(modifier) = &binary.modifier {
            if let Some(matching) = &modifier.matching {
                modified(&left, matching)?;
                modified(&right, matching)?;
            }
            let included = match &modifier.card {
                VectorMatchCardinality::ManyToOne(labels) | VectorMatchCardinality::OneToMany(labels) => {
                    &labels.labels
                }
                _ => &Vec::new(),
            };
            assert!(included.is_empty(), "group_left with labels is not checked");
        }
        let is_union = binary.op.to_string() == "or";
        let left_is_scalar = binary.lhs.value_type() == ValueType::Scalar;
        Ok(match (is_union, left_is_scalar) {
            (true, _) => left.union(&right).cloned().collect(),
            (false, true) => right,
            (false, false) => left,
        })
    }

    fn check_selector(&self, selector: &VectorSelector) -> Result<Names, String> {
        let name = selector.name.as_deref().ok_or("a selector without a name")?;
        let matchers = &selector.matchers.matchers;
        let of_job = |job: &str| {
            matchers
                .iter()
                .filter(|m| m.name == "job")
                .all(|m| m.is_match(job))
        };
        let jobs: Vec<_> = self.jobs.iter().filter(|(job, _)| of_job(job)).collect();
        if jobs.is_empty() {
            return Err(format!("{name}: no such job"));
        }
        let has_job_matcher = matchers.iter().any(|m| m.name == "job");
        if !has_job_matcher && !name.starts_with("kruise_") {
            return Err(format!(
                "{name}: other programs export it, too, and no job is selected"
            ));
        }
        let mut labels = self.labels.clone();
        let mut exports = jobs
            .iter()
            .filter_map(|(_, metrics)| metrics.get(name))
            .peekable();
        if name != UP && exports.peek().is_none() {
            return Err(format!("no program exports {name}"));
        }
        if name != UP && has_job_matcher && jobs.iter().any(|(_, metrics)| !metrics.contains_key(name)) {
            return Err(format!("not each of these jobs exports {name}"));
        }
        exports.for_each(|names| labels.extend(names.iter().cloned()));
        for Matcher { name: label, .. } in matchers {
            if !labels.contains(label) {
                return Err(format!("{name} has no label {label}"));
            }
        }
        Ok(labels)
    }
}

/// Labels after `by`, `without`, `on` or `ignoring`.
fn modified(labels: &Names, modifier: &LabelModifier) -> Result<Names, String> {
    let given: Names = modifier.labels().labels.iter().cloned().collect();
    match given.difference(labels).next() {
        Some(missing) => Err(format!("no label {missing} is left, only {labels:?}")),
        None if modifier.is_include() => Ok(given),
        None => Ok(labels.difference(&given).cloned().collect()),
    }
}

/// The labels of the result of `absent`.
fn equal_matchers(argument: &Expr) -> Names {
    let selector = match argument {
        Expr::VectorSelector(selector) => selector,
        // The matchers of a comparison are lost.
        _ => return Names::new(),
    };
    let matchers = selector.matchers.matchers.iter();
    let equal = matchers.filter(|matcher| matches!(matcher.op, MatchOp::Equal));
    equal.map(|matcher| matcher.name.clone()).collect()
}

/// All values that selectors compare a label of ours with.
fn label_values(expr: &Expr, values: &mut Names) {
    let mut of_selector = |selector: &VectorSelector| {
        let matchers = selector.matchers.matchers.iter();
        let of_program = matchers.filter(|m| m.name != "job" && !m.value.starts_with('$'));
        values.extend(of_program.flat_map(|m| m.value.split('|')).map(str::to_owned));
    };
    match expr {
        Expr::VectorSelector(selector) => of_selector(selector),
        Expr::MatrixSelector(matrix) => of_selector(&matrix.vs),
        Expr::Paren(paren) => label_values(&paren.expr, values),
        Expr::Unary(unary) => label_values(&unary.expr, values),
        Expr::Subquery(subquery) => label_values(&subquery.expr, values),
        Expr::Aggregate(aggregate) => label_values(&aggregate.expr, values),
        Expr::Call(call) => call.args.args.iter().for_each(|arg| label_values(arg, values)),
        Expr::Binary(binary) => {
            label_values(&binary.lhs, values);
            label_values(&binary.rhs, values);
        }
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

/// What stands between `start` and the next `end`, for each `start`.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Vec<&'a str> {
    let parts = text.split(start).skip(1);
    parts.map(|part| part.split(end).next().unwrap().trim()).collect()
}

/// The lines of code of the programs.
fn program_sources() -> String {
    let (mut pending, mut text) = (vec![repo_file("src")], String::new());
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
    text
}

/// An expression of an alert or a panel, where it is, and the text that users read with values of its labels.
struct Query {
    place: String,
    expr: String,
    /// Labels that the text names.
    text_labels: Vec<String>,
}

fn alerts() -> Vec<Value> {
    let groups = yaml("deploy/observability/alerts.yaml");
    let groups = array(&groups["groups"]).iter();
    groups.flat_map(|group| array(&group["rules"])).cloned().collect()
}

fn alert_queries() -> Vec<Query> {
    let query = |alert: Value| {
        let annotations = alert["annotations"].to_string();
        let labels = between(&annotations, "$labels.", " ");
        Query {
            place: string(&alert["alert"]).to_owned(),
            expr: string(&alert["expr"]).to_owned(),
            text_labels: labels.into_iter().map(str::to_owned).collect(),
        }
    };
    alerts().into_iter().map(query).collect()
}

fn dashboard() -> Value {
    serde_json::from_str(&read("deploy/observability/dashboard.json")).unwrap()
}

fn panel_queries() -> Vec<Query> {
    let dashboard = dashboard();
    let panels = array(&dashboard["panels"]).iter();
    let graphs = panels.filter(|panel| panel["type"] != "row");
    let queries = graphs.flat_map(|panel| {
        let query = |target: &Value| {
            let legend = string(&target["legendFormat"]);
            Query {
                place: string(&panel["title"]).to_owned(),
                expr: string(&target["expr"]).replace("$__rate_interval", "5m"),
                text_labels: between(legend, "{{", "}}")
                    .into_iter()
                    .map(str::to_owned)
                    .collect(),
            }
        };
        array(&panel["targets"]).iter().map(query).collect::<Vec<_>>()
    });
    queries.collect()
}

#[test]
fn queries_use_exported_metrics_and_labels() {
    let (targets, sources) = (Targets::load(), program_sources());
    let queries: Vec<Query> = alert_queries().into_iter().chain(panel_queries()).collect();
    assert!(queries.len() > 40, "only {} queries were found", queries.len());
    let mut offences = Vec::new();
    for Query {
        place,
        expr,
        text_labels,
    } in queries
    {
        let checked = parser::parse(&expr).and_then(|parsed| {
            let labels = targets.check(&parsed)?;
            if let Some(label) = text_labels.iter().find(|label| !labels.contains(*label)) {
                return Err(format!("the text names label {label}, the result has {labels:?}"));
            }
            let mut values = Names::new();
            label_values(&parsed, &mut values);
            let unknown = values
                .iter()
                .find(|value| !sources.contains(&format!("\"{value}\"")));
            unknown.map_or(Ok(()), |value| {
                Err(format!("no program uses label value {value}"))
            })
        });
        if let Err(why) = checked {
            offences.push(format!("{place}: {why}\n{expr}"));
        }
    }
    assert!(offences.is_empty(), "{}", offences.join("\n\n"));
}

#[test]
fn queries_with_wrong_names_are_found() {
    let targets = Targets::load();
    let check = |expr: &str| {
        parser::parse(expr)
            .and_then(|parsed| targets.check(&parsed))
            .is_ok()
    };
    assert!(check("sum by (le) (rate(kruise_recreate_seconds_bucket[5m]))"));
    for wrong in [
        "kruise_renamed",
        "kruise_panics",
        "kruise_panics_total{name=\"x\"}",
        "sum by (name) (kruise_panics_total)",
        "sum by (task) (sum by (job) (kruise_panics_total))",
        "kruise_reviews_total{job=\"kruise-daemon\"}",
        "kruise_daemon_fenced{job=~\"kruise-daemon|kruise-manager\"}",
        "up{job=\"daemon\"}",
        "kruise_panics_total and on (name) workqueue_depth",
        "histogram_quantile(0.5, sum(rate(kruise_recreate_seconds_bucket[5m])))",
        "sum(",
    ] {
        assert!(!check(wrong), "{wrong}");
    }
}

#[test]
fn dashboard_has_unique_panels_and_valid_variables() {
    let (targets, dashboard) = (Targets::load(), dashboard());
    let panels = array(&dashboard["panels"]);
    for field in ["id", "title"] {
        let values: BTreeSet<String> = panels.iter().map(|panel| panel[field].to_string()).collect();
        assert_eq!(values.len(), panels.len(), "{field}");
    }
    let rows = panels.iter().filter(|panel| panel["type"] == "row");
    let rows: Vec<_> = rows.map(|row| string(&row["title"])).collect();
    let expected = [
        "Overview",
        "Image pulls",
        "Recreates",
        "Workloads",
        "Admission",
        "Process",
    ];
    assert_eq!(rows, expected);
    let variables = array(&dashboard["templating"]["list"]);
    let names: BTreeSet<_> = variables
        .iter()
        .map(|variable| string(&variable["name"]))
        .collect();
    for query in panel_queries() {
        for name in between(&query.expr, "\"$", "\"") {
            assert!(names.contains(name), "{}: ${name}", query.place);
        }
    }
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let sources = array(&panel["targets"]).iter().chain([panel]);
        for source in sources.map(|part| &part["datasource"]["uid"]) {
            assert_eq!(source, "${datasource}", "{}", panel["title"]);
        }
    }
    let is_query = |variable: &&Value| variable["type"] == "query";
    for variable in variables.iter().filter(is_query) {
        let query = string(&variable["query"]["query"]);
        let inner = query.strip_prefix("label_values(").unwrap();
        let (selector, label) = inner.strip_suffix(')').unwrap().rsplit_once(", ").unwrap();
        let labels = targets.check(&parser::parse(selector).unwrap()).unwrap();
        assert!(labels.contains(label), "{query}");
    }
}

/// Headings of the sections of a page.
fn sections(page: &str) -> Names {
    let headings = page.lines().filter_map(|line| line.strip_prefix("## "));
    headings.map(str::to_owned).collect()
}

#[test]
fn alerts_have_runbooks() {
    let alerts = alerts();
    let page = read(RUNBOOKS);
    let names: Names = alerts
        .iter()
        .map(|alert| string(&alert["alert"]).to_owned())
        .collect();
    assert_eq!(names.len(), alerts.len(), "two alerts have the same name");
    let is_alert = |section: &String| section.starts_with("Kruise");
    let with_runbook: Names = sections(&page).into_iter().filter(is_alert).collect();
    assert_eq!(names, with_runbook);
    for part in ["**Meaning.**", "**Look at.**", "**Do.**"] {
        let found = page.matches(part).count();
        assert_eq!(found, names.len(), "{part}");
    }
    for alert in &alerts {
        let name = string(&alert["alert"]);
        let annotations = &alert["annotations"];
        let anchor = name.to_lowercase();
        let url = format!("https://git.invalid/kruise-rs/{RUNBOOKS}#{anchor}");
        assert_eq!(annotations["runbook_url"], url, "{name}");
        for text in ["summary", "description"] {
            assert!(annotations[text].is_string(), "{name}: {text}");
        }
        let severity = string(&alert["labels"]["severity"]);
        assert!(["critical", "warning"].contains(&severity), "{name}: {severity}");
    }
}

fn pod_template(manifest: &str) -> Value {
    yaml(manifest)["spec"]["template"].clone()
}

#[test]
fn memory_alert_uses_the_limits_of_the_manifests() {
    let alerts = alerts();
    let alert = alerts
        .iter()
        .find(|alert| alert["alert"] == "KruiseMemoryNearLimit");
    let expr = string(&alert.unwrap()["expr"]);
    for (job, manifest) in [
        ("job=\"kruise-daemon\"", "deploy/daemon/daemonset.yaml"),
        (
            "job=~\"kruise-manager|kruise-webhook\"",
            "deploy/manager/deployment.yaml",
        ),
        (
            "job=~\"kruise-manager|kruise-webhook\"",
            "deploy/manager/webhook.yaml",
        ),
    ] {
        let container = &pod_template(manifest)["spec"]["containers"][0];
        let limit = string(&container["resources"]["limits"]["memory"]);
        let mebibytes = limit.strip_suffix("Mi").unwrap();
        let part = format!("process_resident_memory_bytes{{{job}}} > 0.8 * {mebibytes} * 1024 * 1024");
        assert!(expr.contains(&part), "{part}");
    }
}

#[test]
fn scrape_configuration_matches_the_manifests() {
    let scrape = yaml("deploy/observability/scrape.yaml");
    let component = yaml("deploy/observability/kustomization.yaml");
    let patches = array(&component["patches"]);
    let jobs = array(&scrape["scrape_configs"]);
    let manifests = [
        "deploy/daemon/daemonset.yaml",
        "deploy/manager/deployment.yaml",
        "deploy/manager/webhook.yaml",
    ];
    assert_eq!(jobs.len(), manifests.len());
    for (job, manifest) in jobs.iter().zip(manifests) {
        let workload = yaml(manifest);
        let metadata = &workload["metadata"];
        assert_eq!(job["job_name"], metadata["name"]);
        assert_eq!(job["scheme"], "https");
        let discovery = &job["kubernetes_sd_configs"][0];
        assert_eq!(discovery["namespaces"]["names"][0], metadata["namespace"]);
        let template = pod_template(manifest);
        let container = &template["spec"]["containers"][0];
        let ports = container["ports"].as_array();
        let metrics = ports.and_then(|ports| ports.iter().find(|port| port["name"] == "metrics"));
        let patch = patches.iter().find(|patch| {
            let name = string(&patch["target"]["name"]);
            let kind_matches = patch["target"]["kind"] == workload["kind"];
            let names: Vec<&str> = name.split(['(', ')', '|']).collect();
            let suffix = string(&metadata["name"]).strip_prefix("kruise-").unwrap();
            kind_matches && (name == string(&metadata["name"]) || names.contains(&suffix))
        });
        let operations: Value = serde_yaml::from_str(string(&patch.unwrap()["patch"])).unwrap();
        for operation in array(&operations) {
            assert_eq!(operation["op"], "add");
        }
        let mut added = array(&operations).iter().filter_map(|one| one["value"].as_str());
        let port = added.find_map(|flag| flag.strip_prefix("--secure-metrics-addr=:"));
        let port = port.unwrap();

        let rules = array(&job["relabel_configs"]);
        assert_eq!(rules[0]["action"], "drop", "an ended Pod answers no scrape");
        assert_eq!(rules[0]["regex"], "Failed|Succeeded");
        let selection = &rules[1];
        assert_eq!(selection["action"], "keep");
        let part = string(&template["metadata"]["labels"]["control-plane"]);
        match metrics {
            Some(metrics) => {
                // The plain listener has this port in the manifests.
                assert!(added.any(|flag| flag == "--metrics-addr=0"));
                assert_eq!(metrics["containerPort"].to_string(), port);
                assert_eq!(selection["regex"], format!("{part};metrics"));
            }
            None => {
                let container = string(&container["name"]);
                assert_eq!(selection["regex"], format!("{part};{container}"));
                let addresses = rules.iter().filter(|rule| rule["target_label"] == "__address__");
                let addresses: Vec<_> = addresses.map(|rule| string(&rule["replacement"])).collect();
                assert_eq!(addresses, [format!("$1:{port}"), format!("[$1]:{port}")]);
                let host_ports = array(&operations)
                    .iter()
                    .filter_map(|one| one["value"].as_array());
                let host_port = host_ports.flatten().map(|one| one["hostPort"].to_string()).next();
                assert_eq!(host_port.as_deref(), Some(port), "no other Pod gets it");
            }
        }
    }
}

/// The metrics of a row of the table and their labels.
fn table_row(row: &str) -> Option<(Vec<&str>, Names)> {
    let mut cells = row.strip_prefix("| `")?.split(" | ");
    let names = cells.next()?.trim_end_matches('`').split("`, `").collect();
    let labels = cells.next()?.split('`').skip(1).step_by(2);
    Some((names, labels.map(str::to_owned).collect()))
}

#[test]
fn metrics_page_lists_all_metrics_with_their_labels() {
    let page = read("docs/operations/operations.md");
    let section = page.split("\n## ").find(|part| part.starts_with("Metrics\n"));
    let rows = section.unwrap().lines().filter_map(table_row);
    let documented: MetricLabels = rows
        .flat_map(|(names, labels)| {
            names
                .into_iter()
                .map(move |name| (name.to_owned(), labels.clone()))
        })
        .collect();
    let mut all = exported(Program::Daemon);
    all.extend(exported(Program::Manager));
    let exported: MetricLabels = all
        .into_iter()
        .filter(|(name, _)| !name.ends_with("_bucket") && !name.ends_with("_sum"))
        .map(|(name, labels)| (name.trim_end_matches("_count").to_owned(), labels))
        .collect();
    assert_eq!(documented, exported);
}
