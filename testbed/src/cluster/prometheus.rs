//! Prometheus beside a control plane, and the queries of a Grafana dashboard.

use std::fmt::Display;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Cache, Component, ControlPlane, prepare};
use crate::parts::prepare::Part;
use crate::port;

/// A running Prometheus. It ends with the control plane.
pub struct Prometheus {
    /// Host and port, as in a URL.
    address: String,
    _process: Component,
}

/// A query of a dashboard's panel.
#[derive(Clone, Debug)]
pub struct PanelQuery {
    /// ID of the panel.
    pub panel: u64,
    /// Name of the query in the panel.
    pub ref_id: String,
    /// The query, for all values of the dashboard's variables.
    pub expr: String,
}

impl Prometheus {
    /// Starts it with a configuration, and waits until it answers.
    pub fn start(plane: &ControlPlane, configuration: &Value) -> Result<Self> {
        let cache = Cache::open()?;
        prepare::ensure(&cache, &[Part::Prometheus])?;
        let file = plane.dir().join("prometheus.json");
        fs::write(&file, configuration.to_string())?;
        let address = plane.host_port(port::reserve()?);
        let ready = address.clone();
        let mut process = plane
            .component("prometheus", cache.prometheus())
            .args([
                format!("--config.file={}", file.display()),
                format!("--storage.tsdb.path={}", plane.dir().join("tsdb").display()),
                format!("--web.listen-address={address}"),
            ])
            .ready(move || get(&ready, "/-/ready").is_ok());
        process.start()?;
        Ok(Self {
            address,
            _process: process,
        })
    }

    /// `data` of an answer of its API.
    pub fn api(&self, path: &str) -> Result<Value> {
        let body = get(&self.address, &format!("/api/v1/{path}"))?;
        let mut answer: Value = serde_json::from_str(&body).with_context(|| format!("{path}: {body}"))?;
        Ok(answer["data"].take())
    }

    /// The result of a query at this time.
    pub fn query(&self, expr: &str) -> Result<Value> {
        let mut data = self.api(&format!("query?query={}", url_encoded(expr)))?;
        Ok(data["result"].take())
    }

    /// The result of a query for each `step`, all in seconds; the times are since 1970.
    pub fn query_range(&self, expr: &str, start: u64, end: u64, step: u64) -> Result<Value> {
        let query = url_encoded(expr);
        let mut data = self.api(&format!(
            "query_range?query={query}&start={start}&end={end}&step={step}"
        ))?;
        Ok(data["result"].take())
    }
}

/// All queries of a dashboard. `rate_interval` is the least range for a rate.
pub fn dashboard_queries(dashboard: &Value, rate_interval: impl Display) -> Result<Vec<PanelQuery>> {
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let mut queries = Vec::new();
    for panel in panels {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().context("a target without expression")?;
            let expr = expr.replace("$__rate_interval", &rate_interval.to_string());
            queries.push(PanelQuery {
                panel: panel["id"].as_u64().context("a panel without ID")?,
                ref_id: target["refId"]
                    .as_str()
                    .context("a target without refId")?
                    .to_owned(),
                expr: everything_selected(&expr)?,
            });
        }
    }
    Ok(queries)
}

/// An expression whose variables select everything.
fn everything_selected(expr: &str) -> Result<String> {
    let mut parts = expr.split("\"$");
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (_, rest) = part.split_once('"').context("a text without end")?;
        all = all + "\".*\"" + rest;
    }
    Ok(all)
}

fn url_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// The body of a successful response.
fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    // Without HTTP/1.1 there are no chunks.
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").context("no HTTP response")?;
    ensure!(head.contains(" 200 "), "{path}: {head}\n{body}");
    Ok(body.to_owned())
}
