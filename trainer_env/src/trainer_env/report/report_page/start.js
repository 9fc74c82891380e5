showOverview();
showLegend(showCurves());
showSamples();
showHeldOut();
showSettings();
